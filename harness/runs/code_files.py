"""The files that the code of a run consists of: its entry files and all that they import, with one digest.

A file counts as a whole. Comments, formatting, docstrings and annotations of functions and variables do not count: none
of them runs. Imports inside functions are followed, imports for type checkers are not.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from espalier.harness.errors import FOREIGN
from espalier.harness.store.files.digests import digest

#: Folders of the repository; their modules are imported below `espalier`.
FOLDERS = frozenset({"harness", "methods", "serve", "tasks"})

#: Fields of syntax nodes that follow from the place of a node, or are comments.
SILENT = frozenset({"ctx", "type_comment", "type_ignores", "kind"})

#: How the normal form of a syntax node begins, and its other fields.
NODES: dict[type, tuple[str, tuple[str, ...]]] = {
    kind: (f"{kind.__name__}(", tuple(name for name in kind._fields if name not in SILENT))
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
}


class Stamp(NamedTuple):
    """Path, size and time of change, which identify the content of a file."""

    path: Path
    size: int
    changed: int


@dataclass(frozen=True)
class SourceFile:
    """One Python file.

    Attributes:
        digest: SHA-256 of its normal form, empty if nothing runs; of a file that does not parse, of its bytes.
        imports: modules that it imports, and the packages that contain them.
    """

    digest: str
    imports: frozenset[str] = frozenset()


@dataclass
class CodeFiles:
    """The Python files below a folder. Each is parsed once, and again when it has changed.

    Args:
        root: the folder that holds FOLDERS.
    """

    root: Path
    _sources: dict[Stamp, SourceFile] = field(default_factory=dict)
    _digests: dict[Any, tuple[Collection[Stamp], str]] = field(default_factory=dict)

    def digest(self, entries: Iterable[Path], excluded: Iterable[str] = ()) -> str:
        """Return one digest of `closure`. Cost: where it is known, one look at the time of change of each file."""
        key = frozenset(entries), frozenset(excluded)
        stamps, code = self._digests.get(key, ((), ""))
        if not stamps or any(stamp_of(stamp.path) != stamp for stamp in stamps):
            files = self.closure(*key)
            code = digest(sorted((self._name(at.path), file.digest) for at, file in files.items()))
            self._digests[key] = list(files), code
        return code

    def closure(
        self, entries: Iterable[Path], excluded: Iterable[str] = ()
    ) -> dict[Stamp, SourceFile]:
        """Return the entry files and the files below the root that they import, directly or not.

        Args:
            entries: Python files, inside or outside the root.
            excluded: modules and packages that are not followed.
        """
        files: dict[Stamp, SourceFile] = {}
        waiting, visited, stops = list(entries), set[str](), frozenset(excluded)
        while waiting:
            stamp = stamp_of(waiting.pop())
            files[stamp] = self.source(stamp)
            for module in files[stamp].imports - visited:
                visited.add(module)
                path = self.path(module) if stops.isdisjoint(packages_of(module)) else None
                waiting += [] if path is None else [path]
        return files

    def source(self, stamp: Stamp) -> SourceFile:
        """Return the content of a file. Cost: one parse, once, about 15 microseconds a line."""
        if stamp not in self._sources:
            self._sources[stamp] = parse(stamp.path.read_bytes())
        return self._sources[stamp]

    def path(self, module: str) -> Path | None:
        """Return the file of a module below the root, None if there is none."""
        parts = module.removeprefix("espalier.").split(".")
        if parts[0] not in FOLDERS:
            return None
        place = self.root.joinpath(*parts)
        paths = (place.with_suffix(".py"), place / "__init__.py")
        return next((path for path in paths if path.is_file()), None)

    def _name(self, path: Path) -> str:
        """Return the name by which a file counts; one outside the root may be anywhere."""
        inside = path.is_relative_to(self.root)
        return path.relative_to(self.root).as_posix() if inside else path.name


@cache
def code_files(root: Path) -> CodeFiles:
    """Return the files below a folder, the same object for every run of a process."""
    return CodeFiles(root)


def stamp_of(path: Path) -> Stamp:
    """Return the stamp of a file; one that is gone has the size -1."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return Stamp(path, -1, 0)
    return Stamp(path, stat.st_size, stat.st_mtime_ns)


def packages_of(module: str) -> list[str]:
    """Return a module after the packages that contain it."""
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def parse(content: bytes) -> SourceFile:
    """Return the digest and the imports of a Python file."""
    try:
        tree = ast.parse(content)
    except FOREIGN:  # a task that does not run is not for a key to refuse
        return SourceFile(sha256(content).hexdigest())
    writer = _NormalForm()
    for statement in tree.body:
        writer.write(statement)
    text = "".join(writer.text)
    return SourceFile(sha256(text.encode()).hexdigest() if text else "", frozenset(writer.imports))


class _NormalForm:
    """Writes syntax trees as text, and collects their imports."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.imports: set[str] = set()
        self._in_class = False

    def write(self, node: ast.AST) -> None:
        special = SPECIAL.get(type(node))
        if special is None:
            self._fields(node)
        else:
            special(self, node)

    def _fields(self, node: ast.AST, without: str = "") -> None:
        opening, names = NODES[type(node)]
        text = self.text
        text.append(opening)
        for name in names:
            value = None if name == without else getattr(node, name, None)
            if isinstance(value, ast.AST):
                self.write(value)
            elif isinstance(value, list):
                text.append("[")
                for item in value:
                    if isinstance(item, ast.AST):
                        self.write(item)
                    else:
                        text.append(f"{item!r},")
                text.append("]")
            else:
                text.append(f"{value!r},")
        text.append(")")

    def _attribute(self, node: ast.Attribute) -> None:
        names, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            self.text.append(f"{'.'.join([inner.id, *reversed(names)])},")
        else:
            self._fields(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outside, self._in_class = self._in_class, False
        self._fields(node, without="returns")
        self._in_class = outside

    def _class(self, node: ast.ClassDef) -> None:
        outside, self._in_class = self._in_class, True
        self._fields(node)
        self._in_class = outside

    def _annotated(self, node: ast.AnnAssign) -> None:
        if self._in_class:  # dataclasses read it
            self._fields(node)
        elif node.value is not None:
            self._fields(ast.Assign([node.target], node.value))

    def _expression(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant) and not _registers(node.value):
            self._fields(node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            base = "" if isinstance(node, ast.Import) else f"{node.module}."
            self.imports.update(packages_of(f"{base}{alias.name}"))
        self._fields(node)

    def _if(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in (getattr(node.test, "id", ""), getattr(node.test, "attr", "")):
            for statement in node.orelse:
                self.write(statement)
        else:
            self._fields(node)


def _registers(call: ast.expr) -> bool:
    """Return whether an expression is `TABLE.add("name", "module:object")`: the chosen entry of a table is an entry."""
    match call:
        case ast.Call(
            func=ast.Attribute(attr="add"),
            args=[ast.Constant(value=str()), ast.Constant(value=str(target))],
        ):
            module, _, name = target.partition(":")
            return name.isidentifier() and module.replace(".", "").isidentifier()
        case _:
            return False


#: How nodes are written that are not written field by field.
SPECIAL: dict[type[ast.AST], Callable[[_NormalForm, Any], None]] = {
    ast.AnnAssign: _NormalForm._annotated,
    ast.AsyncFunctionDef: _NormalForm._function,
    ast.Attribute: _NormalForm._attribute,
    ast.ClassDef: _NormalForm._class,
    ast.Constant: lambda form, node: form.text.append(f"{node.value!r},"),
    ast.Expr: _NormalForm._expression,
    ast.FunctionDef: _NormalForm._function,
    ast.If: _NormalForm._if,
    ast.Import: _NormalForm._import,
    ast.ImportFrom: _NormalForm._import,
    ast.Name: lambda form, node: form.text.append(f"{node.id},"),
    ast.Pass: lambda form, node: None,  # it may stand where a docstring may as well
    ast.arg: lambda form, node: form.text.append(f"{node.arg},"),
}
