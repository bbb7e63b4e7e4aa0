"""The recipe for a method works as printed in a fresh copy of the checkout, and how recipes are followed.

The copy must then pass the linters and the tests that concern a method. `make recipes`, which CI runs, follows this and
the recipes of docs/recipes in one clone and ends with `make check`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.pages.recipes import ROOT, Step, follow, insert, pages, run, shows, steps_of

#: Tests that concern a new method, and what they are picked by.
CONCERNED = (
    "tests/methods/test_all.py tests/methods/test_signals.py tests/methods/test_matrix.py "
    "tests/methods/test_registry.py tests/pages/test_methods.py -k 'outlier or test_registry or pages'"
)


def copy_of(root: Path) -> Path:
    """All that git does not ignore of this checkout, without its history."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, root / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    return root


def test_the_recipe_for_a_method_works_as_printed(tmp_path: Path) -> None:
    root = copy_of(tmp_path / "espalier")
    follow(steps_of(root / "CONTRIBUTING.md"), root)
    assert (root / "methods" / "outlier.py").is_file()
    assert "[outlier](../methods/outlier.py)" in (root / "docs" / "methods.md").read_text()
    python = '"$VENV/bin/python" -m'
    run(f"{python} ruff check . && {python} ruff format --check .", root)
    run(f"{python} mypy --follow-imports=skip methods/outlier.py", root)
    run('"$VENV/bin/lint-imports" --no-cache', root)
    done = run(f"{python} pytest -q -p no:cacheprovider {CONCERNED}", root)
    assert " passed" in done


def test_every_recipe_makes_something_and_runs_it() -> None:
    names = [page.name for page in pages(ROOT)]
    assert names == ["CONTRIBUTING.md", "benchmark.md", "decoder.md", "model.md"]
    for page in pages(ROOT):
        assert {"write", "run"} <= {step.action for step in steps_of(page)}, page.name


# ---------------------------------------------------------------- how a recipe is followed


def test_a_line_is_inserted_once_below_the_line_that_begins_so(tmp_path: Path) -> None:
    file = tmp_path / "table.py"
    file.write_text("TABLE: list = (\n    1,\n)\n")
    for _ in range(2):
        insert(tmp_path, "table.py", "TABLE:", "    0,\n")
        assert file.read_text() == "TABLE: list = (\n    0,\n    1,\n)\n"
    with pytest.raises(ValueError, match="not enough values"):
        insert(tmp_path, "table.py", "TABEL:", "    0,\n")


def test_columns_may_stand_apart_but_words_are_whole() -> None:
    printed = "none      0  acc 0.99 ± 0.01\nuniform  0.9"
    assert shows(printed, "none 0 acc 0.99 ± 0.01")
    assert not shows(printed, "none 0 acc 0.9")
    assert not shows(printed, "form 0.9")


def test_what_is_not_printed_or_fails_ends_the_recipe(tmp_path: Path) -> None:
    said = Step("run", "", "echo one\necho two\n")
    assert follow([said, Step("see", "", "two\n")], tmp_path) == "one\ntwo\n"
    with pytest.raises(AssertionError, match=r"not printed: \['three'\]"):
        follow([said, Step("see", "", "two\nthree\n")], tmp_path)
    with pytest.raises(AssertionError, match="before"):
        follow([Step("run", "", "echo before\nfalse\necho behind\n")], tmp_path)


def test_a_page_with_an_unknown_step_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- recipe: wirte a.py -->\n```python\nx = 1\n```\n")
    with pytest.raises(AssertionError, match="wirte"):
        steps_of(page)
