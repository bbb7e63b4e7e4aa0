"""Imported files are followed however they are imported, and hashed by what they do."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier.harness.runs.code_files import CodeFiles, parse

START = "espalier.harness.start"


def code(folder: Path, **files: str) -> CodeFiles:
    package = folder / "harness"
    package.mkdir(parents=True, exist_ok=True)
    for name, text in {"__init__": "", **files}.items():
        (package / f"{name}.py").write_text(text)
    return CodeFiles(folder)


def names(files: CodeFiles, *excluded: str) -> set[str]:
    start = files.path(START)
    assert start is not None
    return {stamp.path.stem for stamp in files.closure([start], excluded)} - {"__init__"}


@pytest.mark.parametrize(
    "use",
    [
        "from espalier.harness.other import f",
        "from espalier.harness import other",
        "import espalier.harness.other",
        "import espalier.harness.other as o",
        "def main():\n    from espalier.harness.other import f",
        "try:\n    from espalier.harness.other import f\nexcept ImportError:\n    f = None",
        "from espalier.harness.between import f",
        "from espalier.harness.other import *",
    ],
)
def test_files_are_found_however_they_are_imported(tmp_path: Path, use: str) -> None:
    files = code(
        tmp_path, start=use, between="from espalier.harness.other import f", other="", unused=""
    )
    assert names(files) - {"between"} == {"start", "other"}


def test_imports_for_type_checkers_do_not_run(tmp_path: Path) -> None:
    use = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from espalier.harness import other"
    assert names(code(tmp_path, start=use, other="")) == {"start"}


def test_packages_that_a_module_lies_in_are_imported_too(tmp_path: Path) -> None:
    files = code(tmp_path, start="import torch")
    found = {stamp.path.name for stamp in files.closure([tmp_path / "harness" / "start.py"])}
    assert found == {"start.py"}
    use = code(tmp_path, start="import espalier.harness.other", other="")
    found = {stamp.path.name for stamp in use.closure([tmp_path / "harness" / "start.py"])}
    assert found == {"start.py", "other.py", "__init__.py"}


def test_what_is_excluded_is_not_followed(tmp_path: Path) -> None:
    files = code(tmp_path, start="from espalier.harness.other import f", other="")
    assert names(files, "espalier.harness.other") == {"start"}
    assert names(files, "espalier.harness") == {"start"}
    assert names(files, "espalier.harness.oth") == {"start", "other"}


def test_circles_end(tmp_path: Path) -> None:
    other = "from espalier.harness import start"
    assert names(code(tmp_path, start="from espalier.harness import other", other=other)) == {
        "start",
        "other",
    }


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "x = 1  # because"),
        ("x = 1", '"""Said."""\nx = (1)'),
        ("def f(a): return a", "def f(a: int) -> int:\n    'Said.'\n    return a"),
        ("x = 1", "x: int = 1"),
        ("def f(): pass", "def f():\n    'Said.'"),
        ("x = 1", 'x = 1\nTABLE.add("name", "espalier.harness.new:Class")'),
        ("", "# nothing"),
    ],
)
def test_words_formatting_and_entries_of_tables_do_not_count(one: str, other: str) -> None:
    assert parse(one.encode()).digest == parse(other.encode()).digest


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "x = 2"),
        ("x = 1", "x = 1.0"),
        ("class A:\n    x: int = 1", "class A:\n    x: float = 1"),
        ("def f(a=1): return a", "def f(a=2): return a"),
        ("from math import floor as f", "from math import ceil as f"),
        ("TABLE.add('x')", "TABLE.add('y')"),
        ("x = (1,", "x = (2,"),
    ],
)
def test_what_runs_counts(one: str, other: str) -> None:
    assert parse(one.encode()).digest != parse(other.encode()).digest


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    start = tmp_path / "harness" / "start.py"
    files = code(tmp_path, start="from espalier.harness import other", other="x = 1")
    before = files.digest([start])
    code(tmp_path, start="from espalier.harness import other", other="x = 1  # said")
    assert files.digest([start]) == before
    code(tmp_path, start="from espalier.harness import other", other="x = 12")
    assert files.digest([start]) != before
    (tmp_path / "harness" / "other.py").unlink()
    assert files.digest([start]) != before
