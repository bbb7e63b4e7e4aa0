"""docs/python.md runs as printed, and starts with the README's lines."""

from __future__ import annotations

import re

import pytest

import espalier
from espalier.harness.paths import ROOT

BLOCK = re.compile(r"(?:<!-- (\w+) -->\n)?```python\n(.*?)```", re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """The page's blocks of Python, each with the word that marks it."""
    return BLOCK.findall((ROOT / "docs" / "python.md").read_text())


@pytest.mark.slow
def test_the_page_runs_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sources = blocks()
    # A dataclass asks for the module that its class is in.
    names = {"__name__": __name__}
    # The scene comes before the lines that use it, although a reader meets those first.
    for mark, code in sorted(sources, key=lambda block: block[0] != "scene"):
        if mark != "checkpoint":
            exec(compile(code, "docs/python.md", "exec"), names)
    assert (tmp_path / "kept.png").stat().st_size > 1000
    assert names["answer"].kept > 0
    assert [mark for mark, _ in sources if mark] == ["scene", "checkpoint"]


def test_every_name_is_on_the_page():
    page = (ROOT / "docs" / "python.md").read_text()
    for name in ("load", "wrap", "apply", "video", "evaluate", "methods", "rehearse", "UserError"):
        assert f"espalier.{name}" in page
    fields = [name for name in espalier.Answer.__dataclass_fields__ if not name.startswith("_")]
    assert [name for name in fields if f"answer.{name}" not in page] == ["question"]


def test_the_readme_has_the_same_way_in():
    readme = (ROOT / "README.md").read_text()
    (code,) = [code for _, code in BLOCK.findall(readme) if "import espalier" in code]
    compile(code, "README.md", "exec")
    for call in ("espalier.load(", "espalier.apply(", "pruned.ask(", "answer.show("):
        assert call in code
