"""Text files and the output of other programs are read and written as UTF-8, whatever the locale says."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from espalier.harness.paths import ROOT

FILES = sorted(
    [
        *(ROOT / "harness").rglob("*.py"),
        *(ROOT / "methods").rglob("*.py"),
        *(ROOT / "tasks").rglob("*.py"),
        *ROOT.glob("*.py"),
    ]
)


def bare(tree: ast.AST) -> Iterator[str]:
    """Yield the calls that leave the encoding of a text to the locale.

    ruff's PLW1514 finds them where it knows the type of a path, and only there.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        keys = {keyword.arg for keyword in node.keywords}
        text = keys & {"text", "universal_newlines"} and name in ("run", "Popen", "check_output")
        reads = name in ("read_text", "write_text") and len(node.args) <= (name == "write_text")
        if (text or reads) and "encoding" not in keys:
            yield f"line {node.lineno}: {ast.unparse(node)[:80]}"


@pytest.mark.slow
def test_no_text_depends_on_the_locale() -> None:
    assert {
        path.relative_to(ROOT).as_posix(): calls
        for path in FILES
        if (calls := [*bare(ast.parse(path.read_bytes()))])
    } == {}


@pytest.mark.parametrize(
    "code",
    ["path.read_text()", "self.path.write_text(page)", "subprocess.run(command, text=True)"],
)
def test_the_search_finds_what_it_looks_for(code: str) -> None:
    assert [*bare(ast.parse(code))]
    named = f"{code.removesuffix(')').removesuffix('(')}(encoding='utf-8')"
    if not code.endswith("()"):
        named = code.replace(")", ", encoding='utf-8')")
    assert not [*bare(ast.parse(named))]


def test_the_linter_looks_too() -> None:
    assert "PLW1514" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
