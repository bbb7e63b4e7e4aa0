"""Rows from the index equal those of the files, whatever happened to either."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from espalier.harness.errors import StoreLost
from espalier.harness.reports import results
from espalier.harness.reports.tables.table_formats import FORMATS
from espalier.harness.store import SCHEMA, RunDir, Unreadable
from espalier.harness.store import index as reading
from espalier.harness.store.files import durable
from espalier.harness.store.index import NAME, walk
from tests.tables.stored import commit
from tests.tables.test_rebuilt import rebuilt

ASKED = (
    "run_key",
    "model",
    "method",
    "ratio",
    "settings",
    "metrics",
    "variant",
    "extra.environment",
)
TOP, INNER = ASKED[:-1], ("environment",)

#: What is seen of a run: its key, its row or nothing, what is wrong with it.
IndexedRun = tuple[str, Any, str]


def indexed(store: Path) -> list[IndexedRun]:
    return [(run.path.name, run.row, str(run.problem or "")) for run in walk(store, ASKED)]


def plain(store: Path) -> list[IndexedRun]:
    """Every file read by itself: the reference."""
    runs: list[IndexedRun] = []
    for path in sorted((store / "runs").iterdir()):
        try:
            row = RunDir(path).row()
        except Unreadable as error:
            runs.append((path.name, None, str(error)))
            continue
        if row is not None:
            top = {name: row[name] for name in TOP if name in row}
            row = {**top, "extra": {n: row["extra"][n] for n in INNER if n in row["extra"]}}
        runs.append((path.name, row, ""))
    return runs


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Rows of this version, which are cut, one of the first, and a run without one."""
    root = tmp_path / "store"
    commit(root, "full_rec", 0.804, schema=SCHEMA)
    commit(root, "full_vqa", 0.88, benchmark="seedling_vqa", schema=SCHEMA)
    commit(root, "fast_rec", 0.5, method="fastv", ratio=0.5, schema=SCHEMA)
    commit(root, "old", 0.25, ratio=0.25)
    (root / "runs" / "begun").mkdir()
    return root


def rewritten(dump: Callable[[Any], str]) -> Callable[[Path], object]:
    def change(store: Path) -> object:
        path = store / "runs" / "full_vqa" / "row.json"
        row = json.loads(path.read_text())
        row["metrics"]["accuracy"]["value"] = 0.125
        return path.write_text(dump(row))

    return change


def spoilt(text: str) -> Callable[[Path], object]:
    return lambda store: (store / "runs" / "full_vqa" / "row.json").write_text(text)


CHANGES: dict[str, Callable[[Path], object]] = {
    "made again": lambda store: commit(store, "full_vqa", 0.7, schema=SCHEMA),
    "added": lambda store: commit(store, "another", 0.7, ratio=0.75, schema=SCHEMA),
    "removed": lambda store: shutil.rmtree(store / "runs" / "full_vqa"),
    "without its row": lambda store: (store / "runs" / "full_vqa" / "row.json").unlink(),
    "older": lambda store: commit(store, "full_vqa", 0.7),
    "newer": lambda store: commit(store, "full_vqa", 0.7, schema=SCHEMA + 1),
    "no number of a version": lambda store: commit(store, "full_vqa", 0.7, schema=float(SCHEMA)),
    "without settings": lambda store: commit(store, "full_vqa", 0.7, schema=SCHEMA, settings=None),
    "of another run": lambda store: shutil.copy(
        store / "runs" / "full_rec" / "row.json", store / "runs" / "full_vqa" / "row.json"
    ),
    "torn": spoilt('{\n "schema": 2,\n "run_'),
    "empty": spoilt(""),
    "no block is a table": spoilt('{\n "schema": 2,\n "extra": {\n  "a": 1\n }\n}'),
    "on one line": rewritten(json.dumps),
    "indented otherwise": rewritten(lambda row: json.dumps(row, indent=2)),
    "with an umlaut": rewritten(
        lambda row: json.dumps({**row, "variant": "\u00fc"}, indent=1, ensure_ascii=False)
    ),
    "with a name that is no word": rewritten(
        lambda row: json.dumps({**row, "extra.environment": 1}, indent=1)
    ),
    "with a name twice": rewritten(
        lambda row: json.dumps(row, indent=1).replace('{\n "', '{\n "model": 1,\n "', 1)
    ),
    "a comma too many": rewritten(lambda row: json.dumps(row, indent=1)[:-2] + ",\n}"),
    "a block that is no JSON": rewritten(
        lambda row: json.dumps({**row, "variant": 1}, indent=1).replace(': 1,\n "', ': 1 1,\n "')
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("what", CHANGES)
def test_rows_are_those_of_the_files(what: str, store: Path) -> None:
    expected = plain(store)
    assert indexed(store) == expected  # out of the files
    assert indexed(store) == expected  # out of the index
    CHANGES[what](store)
    changed = plain(store)
    assert changed != expected
    for _ in range(3):
        assert indexed(store) == changed
    (store / NAME).unlink()
    assert indexed(store) == changed


@pytest.mark.slow
def test_rows_of_many_bytes_are_indexed(store: Path) -> None:
    row = json.loads((store / "runs" / "full_rec" / "row.json").read_text())
    row["extra"]["failures"] = ["f" * 4_000_000]
    for number in range(24):
        folder = store / "runs" / f"large{number:02}"
        folder.mkdir()
        (folder / "row.json").write_text(json.dumps({**row, "run_key": folder.name}, indent=1))
    assert indexed(store) == plain(store)


def test_a_file_is_read_once_and_a_damaged_one_each_time(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt("{")(store)
    read: list[str] = []
    real = RunDir.row
    monkeypatch.setattr(RunDir, "row", lambda run: (read.append(run.path.name), real(run))[1])
    for again in ({"fast_rec", "full_rec", "full_vqa", "old"}, {"full_vqa"}, {"full_vqa"}):
        read.clear()
        indexed(store)
        assert set(read) == again


@pytest.mark.slow
def test_a_damaged_index_is_made_anew(store: Path) -> None:
    expected, path = indexed(store), store / NAME
    whole = path.read_bytes()
    places = range(0, len(whole), len(whole) // 20)
    flipped = [whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :] for at in places]
    for content in (b"", b"PAR1", whole[: len(whole) // 2], whole[1:], *flipped):
        path.write_bytes(content)
        assert indexed(store) == expected
    path.unlink()
    path.mkdir()
    assert indexed(store) == expected


def test_a_store_that_cannot_be_written_is_read(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise StoreLost(str(path))

    monkeypatch.setattr(durable, "replace", full)
    for _ in range(2):
        assert indexed(store) == plain(store)
    assert not (store / NAME).exists()


def test_a_few_new_rows_of_many_do_not_write_the_index(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexed(store)
    written = (store / NAME).stat().st_ino
    monkeypatch.setattr(reading, "STALE", 2)
    commit(store, "another", 0.7, schema=SCHEMA)
    assert indexed(store) == plain(store)
    assert (store / NAME).stat().st_ino == written


def test_many_rows_are_joined_in_the_right_order(store: Path) -> None:
    """Several batches, blocks that some rows lack, rows in between and gone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "BATCH", 4)
        for step in range(3):
            for number in range(step, 30, 3):
                lacking = {"extra": {}} if number % 4 == 0 else {}
                commit(store, f"r{number:02d}", number / 30, schema=SCHEMA, **lacking)
            shutil.rmtree(store / "runs" / f"r{9 + step:02d}", ignore_errors=True)
            assert indexed(store) == plain(store)
            assert indexed(store) == plain(store)


@pytest.mark.slow
def test_frames_and_tables_are_the_same_out_of_the_index(store: Path, tmp_path: Path) -> None:
    def all_of_it() -> tuple[pd.DataFrame, list[str], list[str]]:
        table, notes = rebuilt(tmp_path / "papers", store)
        return results.load(store), [text(table) for text in FORMATS.values()], notes

    for change in (lambda _: None, CHANGES["torn"], CHANGES["made again"], CHANGES["older"]):
        change(store)
        (store / NAME).unlink(missing_ok=True)
        frame, *tables = all_of_it()
        for _ in range(2):
            second_frame, *second_tables = all_of_it()
            pd.testing.assert_frame_equal(second_frame, frame)
            assert second_tables == tables
