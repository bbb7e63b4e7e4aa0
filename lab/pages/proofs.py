"""What a method's tests hold it against, read off the code of each test and not off the words in a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

#: What a test uses or is called if it holds a method against this.
USED = {
    "slow version": r"slow_\w+",
    "planted signal": r"(planted_)?recall",
    "tiny models": r"check_method|check_on_engine|check_in_tower|kept_by",
}
CALLED = {
    "worked example": r"example|by_hand|worked",
    "published figures": r"published|released",
    "planted signal": r"planted",
}
KINDS = ("slow version", "worked example", "published figures", "planted signal", "tiny models")

#: Functions that build a method by its name in the registry, and how such a name is marked among the names used.
BUILDERS = ("build", "build_method")
BY_NAME = "method:"


@dataclass(frozen=True)
class Subject:
    """A method: its name in the registry and its class."""

    name: str
    cls: str


def kinds_of(source: str, subject: Subject) -> tuple[str, ...]:
    """Return what the test functions of a file that run a method hold it against, in the order of KINDS.

    A test runs a method if its own code, or what it uses of its file (helpers, constants, fixtures, parameters), names
    the class or builds it by its name. Annotations do not count.

    Args:
        source: text of a test file.
        subject: the method.
    """
    uses = {name: set(_names(node)) for name, node in _definitions(ast.parse(source))}
    found: set[str] = set()
    for test in uses:
        used = _reach(test, uses)
        if test.startswith("test_") and used & {subject.cls, BY_NAME + subject.name}:
            found |= {kind for kind, words in CALLED.items() if re.search(words, test)}
            found |= {
                kind
                for kind, words in USED.items()
                if any(re.fullmatch(words, one) for one in used)
            }
    return tuple(kind for kind in KINDS if kind in found)


def _definitions(module: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield what a file defines: its functions, classes and constants by name."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        yield part.id, node


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the names that code uses, fixtures among them, and the names that it builds methods by."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        first = node.args[0] if node.func.id in BUILDERS and node.args else None
        first = first.elts[0] if isinstance(first, ast.Tuple) and first.elts else first
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield BY_NAME + first.value
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _names(child)


def _reach(start: str, uses: Mapping[str, set[str]]) -> set[str]:
    """Return the names that a definition uses, and those that these use, as far as the file goes."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = uses.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return reached
