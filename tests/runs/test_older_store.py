"""A store that an older version wrote and did not finish: the same command goes on from it, and loses nothing of it.

The store is put together here as that version left it: rows of schema 1, a lock and no lease, journals with fewer
fields, temporary files whose names tell no machine, no columns, no list of cells, no causes of failures.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.cli.store import main as look
from espalier.harness.cli.sweep import main as status
from espalier.harness.engine.session import Session
from espalier.harness.reports import results
from espalier.harness.store import SCHEMA, Store
from espalier.harness.store.files.journal import Journal
from espalier.harness.store.files.lease import file_time
from tests.runs.helpers import Bench
from tests.runs.test_onepass import rows_of, sweep, without_times

#: One cell that was done, one that was killed in its middle, one that had only begun, one whose owner died elsewhere.
DONE, KILLED, BEGUN, LEFT = "none", "fastv", "divprune", "random"
CELLS = (
    f"method={DONE},{KILLED},{BEGUN},{LEFT}",
    "ratio=0.5",
    "limit=4",
    "benchmark=seedling_rec",
    "engine.batch_size=1",
    "engine.warmup=0",
    "engine.paired=0",
    "json=false",
)

#: Answers that were journaled, by cell.
HAD = {DONE: (0, 1, 2, 3), KILLED: (0, 1, 2), BEGUN: (), LEFT: (0, 1)}

#: What a killed writer of that version left beside a file.
TORN = f".row.json-{'0' * 32}"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("undisturbed")
    sweep(store, arguments=CELLS)
    return store


@pytest.fixture
def older(undisturbed: Path, tmp_path: Path) -> Path:
    """The store of an older version, two thirds done."""
    store = tmp_path / "older"
    for made in sorted((undisturbed / "runs").iterdir()):
        row = json.loads((made / "row.json").read_text())
        run = store / "runs" / made.name
        run.mkdir(parents=True)
        shutil.copy(made / "spec.json", run)
        (run / "lock").touch()
        FILLED[row["method"]](run, row, Journal(made / "journal.jsonl").entries())
    (store / "runs" / f".probe-{'0' * 32}").write_bytes(bytes(8))
    (store / "index.json").write_text('{"version": 1, "rows": {}}')
    return store


def answers(entries: list[dict[str, Any]], *numbers: int) -> str:
    """Return the lines of some answers, as journals had them before they kept questions and whole texts."""
    kept = ("task", "doc_id", "answer", "input_tokens", "output_tokens", "record")
    lines = {e["doc_id"]: {name: e[name] for name in kept} for e in entries if "answer" in e}
    return "".join(f"{json.dumps(lines[number])}\n" for number in numbers)


def first_schema(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as schema 1 had it."""
    later = ("answers", "reading_ms", "one_pass")
    extra = {name: value for name, value in row["extra"].items() if name not in later}
    extra["environment"] = {k: v for k, v in extra["environment"].items() if k != "prefetch"}
    model = row["settings"]["model"]
    facts = {**model["facts"], "signals": ["text_attention"]}
    settings = {**row["settings"], "model": {**model, "facts": facts}}
    return {**row, "schema": 1, "extra": extra, "settings": settings}


def done(run: Path, row: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    scores = [entry for entry in entries if "scores" in entry]
    lines = answers(entries, *HAD[DONE]) + "".join(f"{json.dumps(score)}\n" for score in scores)
    (run / "journal.jsonl").write_text(lines)
    (run / "row.json").write_text(f"{json.dumps(first_schema(row), indent=1)}\n")


def killed(run: Path, row: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    """Two processes, of which one was killed while it wrote a line."""
    (run / "journal.jsonl").write_text(answers(entries, 0, 2) + answers(entries, 3)[:40])
    (run / "journal.rank1.jsonl").write_text(answers(entries, 1))
    (run / TORN).write_text('{\n "schema": 1,\n "sta')


def begun(run: Path, row: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    """Nothing but its description."""


def left(run: Path, row: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    """A lease that says less than one of today, whose owner has long been silent."""
    (run / "journal.jsonl").write_text(answers(entries, 0, 1))
    (run / "lease").write_text('{"host": "node7", "pid": 31}\n....')
    long_ago = file_time(run) - 86_400
    os.utime(run / "lease", (long_ago, long_ago))


FILLED = {DONE: done, KILLED: killed, BEGUN: begun, LEFT: left}


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Every sample that a model answers, with the name of the method."""
    calls: list[tuple[str, str]] = []
    real = Session.generate

    def generate(self: Session, inputs: Any, samples: Any = None, **more: Any) -> Any:
        calls.extend((type(self.method).__name__.lower(), sample) for sample in samples)
        return real(self, inputs, samples, **more)

    monkeypatch.setattr(Session, "generate", generate)
    return calls


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without times, and without what says that it was gone on with."""
    row = without_times(row)
    extra = {name: value for name, value in row["extra"].items() if name != "resumed_samples"}
    return {name: value for name, value in row.items() if name != "status"} | {"extra": extra}


def by_method(store: Path) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in rows_of(store).values()}


@pytest.mark.slow
def test_the_same_sweep_goes_on(
    undisturbed: Path, older: Path, answered: list[tuple[str, str]]
) -> None:
    kept = {path: path.read_bytes() for path in older.glob("runs/*/journal*.jsonl")}
    rows = {row["method"]: row for row in sweep(older, arguments=CELLS)}
    missing = {
        (method, f"seedling_rec/{number}")
        for method, had in HAD.items()
        for number in set(range(4)).difference(had)
    }
    assert sorted(answered) == sorted(missing)
    whole = by_method(undisturbed)
    for method, had in HAD.items():
        assert rows[method]["extra"]["resumed_samples"] == (len(had) if method != DONE else 0)
        assert rows[method]["status"] == {DONE: "cached", BEGUN: "done"}.get(method, "resumed")
        if method == DONE:
            # The answers and the files of the benchmark are not known of such a row; all else is.
            whole[method]["extra"]["answers"] = None
            whole[method]["settings"]["benchmark"]["files"] = None
        assert plain(rows[method]) == plain(whole[method])
    # What was there is there: the row is not written anew, and journals have gone on behind their last whole line.
    assert by_method(older)[DONE]["schema"] == 1
    for path, before in kept.items():
        assert path.read_bytes().startswith(before)
    for run, _ in Store(older).finished():
        numbers = [entry["doc_id"] for entry in run.journal.entries() if "answer" in entry]
        assert sorted(numbers) == [0, 1, 2, 3]
        assert not (run.path / "lease").exists()
    # And once more, nothing is left to ask.
    answered.clear()
    assert {row["status"] for row in sweep(older, arguments=CELLS)} == {"cached"}
    assert answered == []


@pytest.mark.slow
def test_a_forced_run_goes_on_too(
    undisturbed: Path, older: Path, answered: list[tuple[str, str]]
) -> None:
    run = Store(older).run(by_method(older)[DONE]["run_key"])
    made = Journal(undisturbed / "runs" / run.path.name / "journal.jsonl").entries()
    (run.path / "forced.jsonl").write_text(answers(made, 0))
    (run.path / "forced.rank1.jsonl").write_text(answers(made, 1))
    cell = (f"method={DONE}", *CELLS[1:], "force=true")
    (row,) = sweep(older, arguments=cell)
    assert [sample for _, sample in answered] == ["seedling_rec/2", "seedling_rec/3"]
    assert row["extra"]["resumed_samples"] == 2
    assert plain(row) == plain(by_method(undisturbed)[DONE])
    assert run.row() == row
    assert run.forced.files() == []


@pytest.mark.slow
def test_every_reader_takes_it(
    older: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = sorted(path.name for path in (older / "runs").iterdir() if path.is_dir())
    (finished,) = rows_of(older)
    store = ("--store", str(older))
    assert look(["ls", *store]) == 0
    out, err = capsys.readouterr()
    assert all(key in out for key in keys)
    assert "1 done" in err
    # A line that a kill cut off is no damage, and nothing is expected of a row that its version did not say.
    assert look(["verify", *store]) == 0
    assert look(["show", finished, *store]) == 0
    assert look(["export", str(tmp_path / "tables"), *store]) == 0
    capsys.readouterr()
    for path in (older, tmp_path / "tables"):
        assert set(results.load(path).run_key) == {finished}
    # It announced no sweep: all of its runs count as one.
    assert status(["status", *store]) == 0
    assert "4 cells: 1 done, 0 running, 0 failed, 3 left" in capsys.readouterr().out


def test_what_its_writers_left_may_go(older: Path, capsys: pytest.CaptureFixture[str]) -> None:
    debris = sorted(path for path in older.rglob(".*-*") if path.is_file())
    assert len(debris) == 2
    # Their names do not say on which machine, so that they go by their age alone.
    assert look(["gc", "--store", str(older)]) == 0
    assert not any(str(path) in capsys.readouterr().out for path in debris)
    long_ago = file_time(older) - 86_400
    for path in debris:
        os.utime(path, (long_ago, long_ago))
    assert look(["gc", "--store", str(older), "--yes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("temporary file" in line for line in lines) == 2
    assert not any(path.exists() for path in debris)
    assert by_method(older)[DONE]["schema"] == 1


# ---------------------------------------------------------------- newer than this version


@pytest.mark.slow
def test_a_newer_row_is_refused_in_one_line_and_stays(bench: Bench) -> None:
    done = bench("method=fastv").last
    path = bench.store / "runs" / done["run_key"] / "row.json"
    newer = json.dumps(done | {"schema": SCHEMA + 1, "metrics": "told otherwise"})
    path.write_text(newer)
    line = bench.refusal("method=fastv")
    assert f"{path} is of schema {SCHEMA + 1}; this version reads 1 to {SCHEMA}; valid: " in line
    assert "the version that wrote it" in line
    assert "damaged" not in line
    assert path.read_text() == newer
    # Other runs are not its business, and it is replaced where that is forced.
    assert bench("method=none").code == 0
    assert bench("method=fastv", "force=true").last["schema"] == SCHEMA


def test_a_newer_row_is_passed_over_by_name(
    older: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (key,) = rows_of(older)
    newer = Store(older).run("f" * 16)
    row = json.loads((older / "runs" / key / "row.json").read_text())
    (newer.path / "row.json").write_text(json.dumps({**row, "schema": 7, "run_key": "f" * 16}))
    assert look(["verify", "--store", str(older)]) == 1
    assert look(["export", str(tmp_path / "tables"), "--store", str(older)]) == 0
    assert set(results.load(older).run_key) == {key}
    assert set(results.load(tmp_path / "tables").run_key) == {key}
    out, err = capsys.readouterr()
    line = f"{newer.path / 'row.json'} is of schema 7; this version reads 1 to {SCHEMA}; valid: "
    assert sum(line in printed for printed in out.splitlines()) == 1
    assert sum(f"passed over: store: {line}" in printed for printed in err.splitlines()) == 1


def test_a_newer_list_of_cells_is_named_and_passed_over(
    older: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = older / "sweeps" / "0123456789ab.json"
    path.parent.mkdir()
    path.write_text('{"version": 2, "cells": {"told": "otherwise"}}')
    assert status(["status", "--store", str(older)]) == 0
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith(f"passed over: {path} is of version 2; this version reads 1; valid: ")
    assert "1 done" in out
