"""How recipes are followed. `make recipes`, which CI runs, follows those of CONTRIBUTING.md and docs/recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages.recipes import CONCERNED, ROOT, Step, follow, insert, pages, shows, steps_of


def test_tests_that_are_told_apart_exist() -> None:
    assert [name for name in CONCERNED if not (ROOT / name).exists()] == []


def test_every_recipe_makes_something_and_runs_it() -> None:
    names = ["benchmark", "compressor", "decoder", "kind", "model", "option"]
    assert [page.stem for page in pages(ROOT)] == ["CONTRIBUTING", *names]
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
    step = Step("run", "", "echo one\necho two\n")
    assert follow([step, Step("see", "", "two\n")], tmp_path) == "one\ntwo\n"
    with pytest.raises(AssertionError, match=r"not printed: \['three'\]"):
        follow([step, Step("see", "", "two\nthree\n")], tmp_path)
    with pytest.raises(AssertionError, match="before"):
        follow([Step("run", "", "echo before\nfalse\necho behind\n")], tmp_path)


def test_a_page_with_an_unknown_step_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- recipe: wirte a.py -->\n```python\nx = 1\n```\n")
    with pytest.raises(AssertionError, match="wirte"):
        steps_of(page)
