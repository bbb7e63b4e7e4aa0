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


def picture_of(name: str) -> str:
    return "image_2" if name == "mmmu" else "image"


#: A benchmark, damage to its files, the exit code, and a pattern of the line beside the place of the samples.
DAMAGED: list[tuple[str, Callable[[Path], None], int, str]] = [
    *(
        (name, truncate, 2, "its data cannot be loaded: .*Parquet")
        for name in ("pope", "docvqa", "gqa")
    ),
    # What a question is made of is found when the benchmark is opened, the rest with the first answers.
    *(
        (name, without(column), code, f"KeyError: '{column}'")
        for name, column, code in (
            *(("pope", "question", 2), ("gqa", "imageId", 2), ("vqav2", "question", 2)),
            *(("textvqa", "image", 1), ("mme", "category", 1)),
        )
    ),
    # A picture that cannot be read is named by its row.
    *(
        (name, cell(picture_of(name), 1, change), 1, rf"failed: \w+/1: (ValueError: )?{reason}")
        for name in ("pope", "vqav2", "mmmu")
        for change, reason in (
            (corrupt, "OSError: Truncated File Read"),
            (half, "OSError: image file is truncated"),
            (elsewhere, "FileNotFoundError: .*'pictures/none.jpg'"),
            (nothing, "columns without a value: .*image"),
        )
    ),
    # GQA's task decodes all pictures when it is opened: none is filled with grey.
    *(
        ("gqa", cell("image", 1, change), 2, reason)
        for change, reason in (
            (half, "buffer"),
            (elsewhere, "pictures/none.jpg"),
            (nothing, "'NoneType' object has no attribute 'convert'"),
        )
    ),
    # A sample without a reference is named before anything is asked.
    *(
        (name, cell(column, 1, nothing), 2, f", row 1: column '{column}' is empty")
        for name, column in (("vqav2", "answers"), ("docvqa", "answers"), ("pope", "answer"))
    ),
    # A reference of another form, and one that is none of the answers.
    (
        "scienceqa_img",
        cell("answer", 1, lambda value: 7),
        1,
        "failed: scienceqa_img/1: IndexError",
    ),
    (
        "pope",
        cell("answer", 1, lambda value: "maybe"),
        1,
        "1 of 6 samples failed: pope_by_kind/1: AssertionError",
    ),
]


@pytest.mark.sampled(18)
@pytest.mark.parametrize(("name", "damage", "code", "line"), DAMAGED)
def test_damage_is_named_with_its_place(
    damaged: Run, name: str, damage: Callable[[Path], None], code: int, line: str
) -> None:
    exit_code, message = damaged(name, damage)
    assert exit_code == code
    assert PLACES[name] in message
    assert re.search(line, message)
    assert message.count("benchmark.task") <= (code == 2)


@pytest.mark.slow
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
