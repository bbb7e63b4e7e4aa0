"""A Python file as the definitions that it holds, each of which may be reached on its own."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from espalier.harness.runs.normal_code import (
    Binding,
    Bindings,
    Code,
    Imports,
    chain_of,
    for_checkers,
    read,
)

#: Decorators, and modules of decorators, that enter what they decorate in no table.
PLAIN = frozenset({"dataclass", "cache", "lru_cache", "contextmanager", "contextlib", "torch"})


@dataclass(frozen=True)
class Source:
    """One file.

    Attributes:
        definitions: what binds a name at the top level.
        entries: statements `TABLE.add("key", ...)` that fill a table of the file, by its name and the key.
        items: the values of a dict that is written down at the top level, by its name and the key.
        effects: what else runs when the file is imported.
        imports: what its imports bind.
        hints: the same of imports for type checkers alone.
        loads: what it imports when it is imported itself.
    """

    definitions: dict[str, Code]
    entries: dict[str, dict[str, Code]]
    items: dict[str, dict[str, Code]]
    effects: Code
    imports: Bindings
    hints: Bindings
    loads: tuple[Binding, ...]

    def __contains__(self, name: object) -> bool:
        """Say whether the file defines or imports a name."""
        return name in self.definitions or name in self.imports


def parse(text: str, package: str) -> Source:
    """Return what a file of a package holds. Cost: about 30 microseconds a line; the syntax tree is let go.

    Raises:
        SyntaxError: it is no Python.
    """
    defining: dict[str, list[ast.stmt]] = {}
    entries: dict[str, dict[str, Code]] = {}
    items: dict[str, dict[str, Code]] = {}
    running: list[ast.stmt] = []
    imports, hints = Imports(package), Imports(package)
    for statement in ast.parse(text).body:
        entry, names = _entry(statement), _bound(statement)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            imports.add(statement)
        elif isinstance(statement, ast.If) and for_checkers(statement):
            for one in _imports(statement):
                hints.add(one)
        elif entry is not None and entry[0] in defining:
            table, key = entry
            entries.setdefault(table, {})[key] = read([statement], package)
        elif names:
            for name in names:
                defining.setdefault(name, []).append(statement)
                items |= {name: found} if (found := _items(statement, package)) else {}
            if _registers(statement):
                running.append(statement)
        elif not _is_main(statement):
            running.append(statement)
            for one in _imports(statement):
                imports.add(one)
    return Source(
        definitions={name: read(found, package) for name, found in defining.items()},
        entries=entries,
        items={name: found for name, found in items.items() if len(defining[name]) == 1},
        effects=read(running, package),
        imports=imports.names,
        hints=hints.names,
        loads=tuple(imports.loads),
    )


def _items(statement: ast.stmt, package: str) -> dict[str, Code]:
    """Return the values of a dict that a statement writes down, by keys that are strings or names."""
    value = getattr(statement, "value", None)
    keys = value.keys if isinstance(value, ast.Dict) else []
    names = [_key(key) for key in keys]
    if None in names:
        return {}
    return {
        name: read([ast.Expr(item)], package)
        for name, item in zip(names, getattr(value, "values", ()), strict=False)
        if name is not None
    }


def _key(key: ast.expr | None) -> str | None:
    match key:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return name
        case _:
            return None


def _imports(statement: ast.stmt) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports inside a statement."""
    return [one for one in ast.walk(statement) if isinstance(one, ast.Import | ast.ImportFrom)]


def _bound(statement: ast.stmt) -> list[str]:
    """Return the names that a statement binds and does nothing else; none of those that run code besides."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return _names(targets)
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            return _names([target])
        case _:
            return []


def _names(targets: Iterable[ast.expr]) -> list[str]:
    found: list[str] = []
    for target in targets:
        inner = target.elts if isinstance(target, ast.Tuple) else [target]
        if not all(isinstance(one, ast.Name) for one in inner):
            return []  # something else is changed: that is an effect
        found += [one.id for one in inner if isinstance(one, ast.Name)]
    return found


def _registers(statement: ast.stmt) -> bool:
    """Say whether a decorator may enter the definition in a table."""
    for one in getattr(statement, "decorator_list", ()):
        chain = chain_of(one.func if isinstance(one, ast.Call) else one)
        if chain is None or chain[0] not in PLAIN:
            return True
    return False


def _entry(statement: ast.stmt) -> tuple[str, str] | None:
    """Return table and key of a statement `TABLE.add("key", ...)`."""
    match statement:
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=ast.Name(id=table), attr="add"),
                args=[ast.Constant(value=str(key)), *_],
            )
        ):
            return table, key
        case _:
            return None


def _is_main(statement: ast.stmt) -> bool:
    """Say whether a statement runs only in a file that is started as a program."""
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'"
