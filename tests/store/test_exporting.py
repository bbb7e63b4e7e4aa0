"""A repeated export gives the tables of a first one, and reads only runs that changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from espalier.harness.errors import StoreLost
from espalier.harness.paths import ROOT
from espalier.harness.store import Store, index
from espalier.harness.store.exports import (
    ROWS,
    SAMPLES,
    ExportResult,
    dated_rows,
    write_tables,
)
from espalier.harness.store.files import durable
from espalier.harness.store.index import NAME, walk
from tests.refused import refused
from tests.store.test_upkeep import add, first

#: Runs of the store.
KEYS = ("aa", "bb", "cc", "dd")

Change = Callable[[Path, Path], object]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    for place, key in enumerate(KEYS):
        add(root, key, [1.0, 0.5][: 1 + place % 2])
        date(root, key, 1_000.0 - place)
    return root


def date(root: Path, key: str, when: float) -> None:
    """Make a row as old as that: the order of tables is that of rows' ages, here the other way round than keys."""
    os.utime(root / "runs" / key / "row.json", (when, when))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def from_nothing(store: Path) -> dict[str, bytes]:
    """Return the tables of a first export, the reference."""
    copy, folder = store.with_name("copy"), store.with_name("full")
    for place in (copy, folder):
        shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(store, copy)
    (copy / NAME).unlink(missing_ok=True)
    write_tables(copy, folder)
    return content(folder)


#: Exports a store in a process that notes every file of runs that it opens, by whatever call.
OPENED = """
import os, sys
opened = []
sys.addaudithook(lambda name, given: name == "open" and opened.append(str(given[0])))
from espalier.harness.cli.store import main
status = main(["export", sys.argv[2], "--store", sys.argv[1]])
runs = os.path.join(sys.argv[1], "runs", "")
print(*(path.removeprefix(runs) for path in opened if path.startswith(runs)))
sys.exit(status)
"""


def printed(code: str, *arguments: Path) -> list[str]:
    """Return the words of the last line that code prints in another process."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    output = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    return output.splitlines()[-1].split()


@pytest.mark.slow
def test_only_what_changed_is_opened(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    for number in range(10):
        add(store, f"many{number:02d}", [1.0, 0.0])
    files = {f"{path.name}/{name}" for path in (store / "runs").iterdir() for name in FILES}
    assert {*printed(OPENED, store, folder)} == files
    assert len(files) == 28
    before = {path.name: path.stat().st_ino for path in (*folder.iterdir(), store / NAME)}
    assert {*printed(OPENED, store, folder)} == set()
    # Nothing is written either.
    assert {p.name: p.stat().st_ino for p in (*folder.iterdir(), store / NAME)} == before
    add(store, "new1", [0.25])
    add(store, "new2", [0.75])
    add(store, "many07", [0.0, 0.5])
    assert {*printed(OPENED, store, folder)} == {
        f"{key}/{f}" for key in ("new1", "new2", "many07") for f in FILES
    }
    assert content(folder) == from_nothing(store)


#: Reads an export and the rows in columns that are written already; prints the number of threads before and after.
THREADS = """
import os, sys
from pathlib import Path
from espalier.harness.store.exports import write_tables
from espalier.harness.store.index import walk
threads = lambda: len(os.listdir("/proc/self/task"))
before, store = threads(), Path(sys.argv[1])
assert write_tables(store, Path(sys.argv[2])).read == 0
assert len(list(walk(store, ["method"]))) == 4
print(before, threads())
"""


def test_no_thread_outlives_a_reader(store: Path, tmp_path: Path) -> None:
    """A thread that lets go of Python's bytes while Python ends aborts the process, once in hundreds."""
    write_tables(store, tmp_path / "tables")
    assert len(list(walk(store, ["method"]))) == 4
    before, after = printed(THREADS, store, tmp_path / "tables")
    assert before == after


#: What an export reads of a run.
FILES = ("row.json", "journal.jsonl")


def journaled(store: Path, key: str, name: str = "journal.jsonl", **entry: Any) -> None:
    path = store / "runs" / key / name
    durable.append(path, f"{json.dumps({'task': 't', 'doc_id': 7, **entry})}\n")


def older(store: Path, _: Path) -> None:
    row = Store(store).run("bb").row()
    (store / "runs/bb/row.json").write_text(json.dumps(first(row)))


def other_tables(store: Path, folder: Path) -> None:
    """Tables of another store in the place of these."""
    other_store = store.with_name("other")
    add(other_store, "aa", [0.125])
    write_tables(other_store, folder)


def spoilt(name: str) -> Change:
    def change(_: Path, folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 0x55
        (folder / name).write_bytes(content)

    return change


def rewritten(name: str) -> Change:
    """The same lines, in another file."""
    return lambda _, folder: pq.write_table(pq.read_table(folder / name), folder / name)


#: What may happen between two exports, and how many runs the second one reads.
CHANGES: dict[str, tuple[Change, int]] = {
    "nothing": (lambda store, folder: None, 0),
    "added": (lambda store, folder: add(store, "ee", [1.0]), 1),
    "added, older than all": (
        lambda store, folder: (add(store, "ee", [1.0]), date(store, "ee", 1)),
        1,
    ),
    "made again": (lambda store, folder: add(store, "bb", [0.0]), 1),
    "made again at the same time": (
        lambda store, folder: (add(store, "bb", [0.0]), date(store, "bb", 999.0)),
        1,
    ),
    "touched": (lambda store, folder: date(store, "aa", 2_000.0), 1),
    "order alone": (lambda store, folder: date(store, "aa", 1.0), 1),
    "lifted": (older, 1),
    "removed": (lambda store, folder: shutil.rmtree(store / "runs/cc"), 0),
    "row removed": (lambda store, folder: (store / "runs/cc/row.json").unlink(), 0),
    "damaged row": (lambda store, folder: (store / "runs/cc/row.json").write_text("{"), 1),
    "copied run": (lambda store, folder: shutil.copytree(store / "runs/aa", store / "runs/ff"), 1),
    "scored again": (lambda store, folder: journaled(store, "dd", scores={"acc": 0.5}), 1),
    "a rank's journal": (
        lambda store, folder: journaled(store, "dd", "journal.rank1.jsonl", scores={"acc": 0.5}),
        1,
    ),
    "journal removed": (lambda store, folder: (store / "runs/dd/journal.jsonl").unlink(), 1),
    "forced journal": (lambda store, folder: journaled(store, "dd", "forced.jsonl"), 0),
    "damaged rows": (spoilt(ROWS), 0),
    "damaged scores": (spoilt(SAMPLES), 0),
    "rows of another writer": (rewritten(ROWS), 0),
    "scores of another writer": (rewritten(SAMPLES), 0),
    "tables of another store": (other_tables, 0),
    "no rows": (lambda store, folder: (folder / ROWS).unlink(), 0),
    "no scores": (lambda store, folder: (folder / SAMPLES).unlink(), 0),
    "no tables": (lambda store, folder: shutil.rmtree(folder), 0),
    "no index": (lambda store, folder: (store / NAME).unlink(), 4),
}


@pytest.mark.sampled
@pytest.mark.parametrize("what", CHANGES)
def test_tables_are_those_written_from_nothing(what: str, store: Path, tmp_path: Path) -> None:
    folder, (change, reads) = tmp_path / "tables", CHANGES[what]
    assert write_tables(store, folder).read == 4
    change(store, folder)
    full = from_nothing(store)
    written = write_tables(store, folder)
    assert content(folder) == full
    assert written == ExportResult(
        len(pq.read_table(folder / ROWS)), sum(map(len, full.values())), reads
    )
    # Again: what is damaged in the store is read each time, and nothing else.
    assert write_tables(store, folder).read == (what in ("damaged row", "copied run"))
    assert content(folder) == full
    add(store, "zz", [0.5, 0.25, 0.0])
    write_tables(store, folder)
    assert content(folder) == from_nothing(store)


@pytest.mark.slow
def test_a_damaged_index_is_made_anew(store: Path, tmp_path: Path) -> None:
    folder, path = tmp_path / "tables", store / NAME
    write_tables(store, folder)
    full, index = content(folder), path.read_bytes()
    places = range(0, len(index), len(index) // 10)
    flipped = [index[:at] + bytes([index[at] ^ 0x55]) + index[at + 1 :] for at in places]
    for damaged in (b"", b"{}", index[: len(index) // 2], index[1:], *flipped):
        path.write_bytes(damaged)
        assert write_tables(store, folder).read == 4
        assert content(folder) == full
    path.unlink()
    path.mkdir()
    assert write_tables(store, folder).read == 4
    assert content(folder) == full


def test_other_code_reads_all(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tables"
    write_tables(store, folder)
    monkeypatch.setattr(index, "_code", lambda: b"later")
    assert write_tables(store, folder).read == 4


def test_a_copy_of_the_tables_does_as_well(store: Path, tmp_path: Path) -> None:
    """What was read for one folder is there for another."""
    write_tables(store, tmp_path / "tables")
    shutil.copytree(tmp_path / "tables", tmp_path / "copy")
    add(store, "ee", [1.0])
    assert write_tables(store, tmp_path / "copy").read == 1
    assert write_tables(store, tmp_path / "tables").read == 0
    assert content(tmp_path / "tables") == content(tmp_path / "copy") == from_nothing(store)


@pytest.mark.parametrize("last", [NAME, SAMPLES, ROWS])
def test_an_export_that_is_killed_is_made_up_for(
    last: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plain = tmp_path / "tables", durable.replace

    def killed(path: Path, written: bytes) -> None:
        plain(path, written)
        if path.name == last:
            raise KeyboardInterrupt

    write_tables(store, folder)
    add(store, "ee", [1.0])
    with monkeypatch.context() as patch:
        patch.setattr(durable, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write_tables(store, folder)
    assert write_tables(store, folder).read == 0
    assert content(folder) == from_nothing(store)


def test_a_store_that_cannot_be_written_is_exported_in_full(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, plain = from_nothing(store), durable.replace

    def refused(path: Path, written: bytes) -> None:
        if path.parent == store:
            raise StoreLost(str(path))
        plain(path, written)

    monkeypatch.setattr(durable, "replace", refused)
    for _ in range(2):
        assert write_tables(store, tmp_path / "tables").read == 4
        assert content(tmp_path / "tables") == full
    assert not (store / NAME).exists()


def test_a_store_that_lost_its_rows_leaves_the_tables_alone(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    write_tables(store, folder)
    before = content(folder)
    shutil.rmtree(store / "runs")
    assert "holds no finished runs; valid: a store with rows" in refused(
        write_tables, store, folder
    )
    assert content(folder) == before
    assert len(dated_rows(folder)) == 4


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("cli.store", ["export", ""]),
        ("cli.store", ["ls", "--store", ""]),
        ("cli.store", ["show", "0123", "--pictures", ""]),
        ("cli.curves", ["--out", ""]),
        ("reports.tables.rebuild", ["all", "--out", ""]),
        ("reports.curves.decoder_report", ["--write", ""]),
    ],
)
def test_an_empty_path_is_not_the_working_folder(
    module: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A variable that is not set gives an empty argument."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        import_module(f"espalier.harness.{module}").main(arguments)
    assert stopped.value.code == 2
    assert "'' is no path" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
