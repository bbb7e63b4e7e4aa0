"""Data that cannot be used end a run in one line with data set, split and row or file; they never become a zero."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import run
from espalier.harness.store import Store
from tests.benchmarks.fixtures import FIXTURES
from tests.benchmarks.runs import arguments

#: Changes a table; None: leaves it.
Damage = Callable[[pa.Table], pa.Table]

Run = Callable[[str, Callable[[Path], None]], tuple[int, str]]


@pytest.fixture
def damaged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a benchmark whose parquet files were changed: exit code and last line of stderr."""

    def run_damaged(name: str, damage: Callable[[Path], None]) -> tuple[int, str]:
        FIXTURES[name](tmp_path / "data")
        for file in (tmp_path / "data").rglob("*.parquet"):
            damage(file)
        code = run.main(arguments(name, tmp_path / "data", tmp_path / "store"))
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
        assert len(lines) == 1
        assert not list(Store(tmp_path / "store").rows())
        return code, lines[0]

    return run_damaged


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without(column: str) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        table = pq.read_table(file)
        if column in table.column_names:
            pq.write_table(table.drop_columns([column]), file)

    return change


def cell(column: str, row: int, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Return what changes one value of each table that has the column."""

    def damage(file: Path) -> None:
        table = pq.read_table(file)
        if column in table.column_names:
            values = table.column(column).to_pylist()
            values[row] = change(values[row])
            place, kind = table.column_names.index(column), table.schema.field(column)
            pq.write_table(table.set_column(place, kind, pa.array(values, type=kind.type)), file)

    return damage


def nothing(value: Any) -> None:
    return None


def corrupt(value: dict[str, Any]) -> dict[str, Any]:
    return {"bytes": value["bytes"][:40] + b"zzzz" * 10, "path": None}


def half(value: dict[str, Any]) -> dict[str, Any]:
    return {"bytes": value["bytes"][: len(value["bytes"]) // 2], "path": None}


def elsewhere(value: dict[str, Any]) -> dict[str, Any]:
    return {"bytes": None, "path": "pictures/none.jpg"}


#: Where the samples of a benchmark come from, as lines say it.
PLACES = {
    "pope": "data set 'lmms-lab-encoder/POPE', split 'test'",
    "docvqa": "data set 'lmms-lab-encoder/DocVQA', configuration 'DocVQA', split 'validation'",
    "gqa": "data set 'lmms-lab-encoder/GQA', configuration 'testdev_balanced_instructions', split 'testdev'",
    "mme": "data set 'lmms-lab-encoder/MME', split 'test'",
    "vqav2": "data set 'lmms-lab-encoder/VQAv2', split 'validation'",
    "textvqa": "data set 'lmms-lab-encoder/textvqa', split 'validation'",
    "mmmu": "data set 'lmms-lab-encoder/MMMU', split 'validation'",
    "scienceqa_img": "data set 'lmms-lab-encoder/ScienceQA', configuration 'ScienceQA-IMG', split 'test'",
}


@pytest.mark.parametrize("name", ["pope", "docvqa", "gqa"])
def test_a_truncated_file_is_named(damaged: Run, name: str) -> None:
    code, line = damaged(name, truncate)
    assert code == 2
    assert PLACES[name] in line
    assert re.search(r"file '.*\.parquet' is damaged", line)


@pytest.mark.parametrize(
    ("name", "column", "code"),
    [
        # What a question is made of is found when the benchmark is opened, the rest with the first answers.
        *(("pope", "question", 2), ("gqa", "imageId", 2), ("vqav2", "question", 2)),
        *(("textvqa", "image", 1), ("mme", "category", 1)),
    ],
)
def test_a_column_that_is_gone_is_named(damaged: Run, name: str, column: str, code: int) -> None:
    found, line = damaged(name, without(column))
    assert found == code
    assert PLACES[name] in line
    assert f"KeyError: '{column}'" in line


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["pope", "vqav2", "mmmu"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (corrupt, "OSError: Truncated File Read"),
        (half, "OSError: image file is truncated"),
        (elsewhere, "FileNotFoundError: .*'pictures/none.jpg'"),
        (nothing, "columns without a value: .*image"),
    ],
)
def test_a_picture_that_cannot_be_read_is_named_by_its_row(
    damaged: Run, name: str, change: Callable[[Any], Any], reason: str
) -> None:
    column = "image_2" if name == "mmmu" else "image"
    code, line = damaged(name, cell(column, 1, change))
    assert code == 1
    assert re.search(rf"failed: \w+/1: (ValueError: )?{reason}", line)
    assert f"/<row> is of {PLACES[name]}" in line


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (half, "buffer"),
        (elsewhere, "pictures/none.jpg"),
        (nothing, "'NoneType' object has no attribute 'convert'"),
    ],
)
def test_a_picture_that_is_read_before_the_questions_is_not_filled_with_grey(
    damaged: Run, change: Callable[[Any], Any], reason: str
) -> None:
    """GQA's task decodes all pictures when it is opened."""
    code, line = damaged("gqa", cell("image", 1, change))
    assert code == 2
    assert PLACES["gqa"] in line
    assert reason in line


@pytest.mark.parametrize(
    ("name", "column"), [("vqav2", "answers"), ("docvqa", "answers"), ("pope", "answer")]
)
def test_a_sample_without_reference_is_named_before_anything_is_asked(
    damaged: Run, name: str, column: str
) -> None:
    code, line = damaged(name, cell(column, 1, nothing))
    assert code == 2
    assert f"{PLACES[name]}, row 1: column '{column}' is empty" in line


def test_a_reference_of_another_form_is_named_by_its_row(damaged: Run) -> None:
    code, line = damaged("scienceqa_img", cell("answer", 1, lambda value: 7))
    assert code == 1
    place = f"{PLACES['scienceqa_img']}, row 1: its target cannot be read: IndexError"
    assert f"failed: scienceqa_img/1: {place}" in line
    assert line.count("benchmark.task") == 0


def test_a_reference_that_is_none_of_the_answers_is_named_by_its_row(damaged: Run) -> None:
    code, line = damaged("pope", cell("answer", 1, lambda value: "maybe"))
    assert code == 1
    assert "1 of 6 samples failed: pope_by_kind/1: AssertionError" in line
    assert PLACES["pope"] in line


def test_a_sample_that_shows_nothing_is_an_error_unless_it_may_be_a_text(
    damaged: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """ScienceQA's task answers a question without a picture as a text, without a word."""
    code, line = damaged("scienceqa_img", cell("image", 1, nothing))
    assert code == 1
    assert "scienceqa_img/1: ValueError: the sample has no picture and no video" in line
    assert PLACES["scienceqa_img"] in line
    argv = arguments("scienceqa_img", tmp_path / "data", tmp_path / "store")
    assert run.main([*argv, "benchmark.media=optional"]) == 0
    capfd.readouterr()
    (row,) = Store(tmp_path / "store").rows()
    assert row["n_samples"] > 1
