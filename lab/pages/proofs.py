"""Kinds of comparison in a method's tests, determined from the code of each test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

#: Names that a test uses, or has, if it makes this kind of comparison; keywords end in "=".
USED = {
    "slow version": r"slow_\w+|check_method",
    "published figures": r"released=",
    "planted signal": r"(planted_)?recall",
    "tiny models": r"check_adaptive|check_stages|check_in_tower|kept_by",
}
CALLED = {
    "worked example": r"example|by_hand|worked",
    "published figures": r"published|released",
    "planted signal": r"planted",
}
KINDS = ("slow version", "worked example", "published figures", "planted signal", "tiny models")

#: Functions that build a method by its registry name, and the mark of such names among the names used.
BUILDERS = ("build", "build_method", "check_method")
BY_NAME = "method:"


@dataclass(frozen=True)
class Subject:
    """A method: its name in the registry and its class."""

    name: str
    cls: str


def kinds_of(source: str, subject: Subject) -> tuple[str, ...]:
    """Return the kinds of comparison in the tests that run a method, in the order of KINDS.

    A test runs a method if its code, or code of the file that it uses (helpers, constants, fixtures, parameters), names
    the class or builds it by its name. Annotations do not count.

    Args:
        source: text of a test file.
        subject: the method.
    """
    uses = {name: set(_names(node)) for name, node in _definitions(ast.parse(source))}
    kinds: set[str] = set()
    for test in uses:
        used = _reach(test, uses)
        if test.startswith("test_") and used & {subject.cls, BY_NAME + subject.name}:
            kinds |= {kind for kind, words in CALLED.items() if re.search(words, test)}
            kinds |= {
                kind
                for kind, words in USED.items()
                if any(re.fullmatch(words, name) for name in used)
            }
    return tuple(kind for kind in KINDS if kind in kinds)


def _definitions(module: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield the functions, classes and constants of a file by name."""
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
    """Yield the names that code uses, including fixtures and keywords, and the registry names of methods it builds."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.arg | ast.keyword):
        yield node.arg if isinstance(node, ast.arg) else f"{node.arg}="
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
    """Return the names that a definition uses directly or indirectly within the file."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = uses.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return reached
