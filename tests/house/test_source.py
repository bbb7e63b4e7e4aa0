"""Imports inside functions have a reason beside them, and private methods a caller."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from espalier.harness.paths import ROOT

FILES = sorted([*ROOT.glob("harness/**/*.py"), *ROOT.glob("methods/**/*.py")])

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORTS = (ast.Import, ast.ImportFrom)


def unexplained(source: str) -> list[int]:
    """Return the lines of imports inside functions that have no reason: beside them, above, or above their run."""
    lines = source.splitlines()
    numbers: set[int] = set()
    for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, FUNCTIONS)):
        for block in blocks(function):
            explained = False  # what follows an explained import without a gap shares its reason
            for statement in block:
                if not isinstance(statement, IMPORTS):
                    explained = False
                    continue
                last = statement.end_lineno or statement.lineno
                near = [lines[statement.lineno - 2].strip(), *lines[statement.lineno - 1 : last]]
                explained = explained or near[0].startswith("#") or any(map(reason, near[1:]))
                if not explained:
                    numbers.add(statement.lineno)
    return sorted(numbers)


def blocks(function: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield every list of statements inside a function: its body, branches, handlers."""
    for node in ast.walk(function):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def reason(line: str) -> bool:
    """Say whether a line of code ends in a comment that is not a checker's."""
    return re.search(r"#(?! *(noqa|type:|pragma))", line) is not None


@pytest.mark.sampled
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_says_why(path: Path) -> None:
    assert unexplained(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("import torch", [2]),
        ("# It takes seconds.\n    import torch", []),
        ("import torch  # it takes seconds", []),
        ("import torch  # noqa: PLC0415", [2]),
        ("# It takes seconds.\n    import torch\n\n    from rich import print", []),
        ("# It takes seconds.\n    import torch\n    x = 1\n    import rich", [5]),
        ("try:\n        import torch\n    except ImportError:\n        import rich", [3, 5]),
        (
            "if True:\n        # It takes seconds.\n        from torch import (\n            nn,\n        )",
            [],
        ),
    ],
)
def test_it_sees_what_has_no_reason(body: str, lines: list[int]) -> None:
    assert unexplained(f"def function():\n    {body}\n") == lines


def unmentioned(source: str) -> list[str]:
    """Return the private methods that a file mentions only where it defines them."""
    return [
        method
        for method in re.findall(r"^    def (_\w*[a-z0-9])\(", source, re.MULTILINE)
        if len(re.findall(rf"\b{method}\b", source)) == 1
    ]


@pytest.mark.slow
def test_every_private_method_has_a_caller() -> None:
    """A hook of a base class that is gone leaves the methods of its subclasses without one."""
    for path in FILES:
        for method in unmentioned(path.read_text(encoding="utf-8")):
            name = ".".join(("espalier", *path.relative_to(ROOT).with_suffix("").parts))
            owner = next(
                value
                for value in vars(import_module(name)).values()
                if getattr(value, "__module__", "") == name
                and method in getattr(value, "__dict__", ())
            )
            assert any(method in vars(base) for base in owner.__mro__[1:]), (path, method)


def test_it_sees_a_method_without_a_caller() -> None:
    assert unmentioned("    def _hook(self): ...\n    def _used(self): self._used()\n") == ["_hook"]
