"""What runs leave in a store for whoever looks on: the cells of a sweep, why a run failed, journals of two owners."""

from __future__ import annotations

import json

import pytest

from espalier.harness.evaluation.samples import Failure, SampleErrors
from espalier.harness.runs.hints import commands
from espalier.harness.store import SCHEMA, RunDir, Store
from espalier.harness.store.answer_digest import digest_of, journal_answers, matches_row
from espalier.harness.store.run_entries import DONE, FAILED, UNFINISHED, entries
from espalier.harness.store.sweep_files import find
from tests.runs.helpers import Bench


@pytest.mark.slow
def test_a_sweep_leaves_its_cells_before_the_first_runs(bench: Bench) -> None:
    bench.fake.stop_after = 0
    argv = ("-m", "method=random,fastv", "ratio=0.5,0.9")
    assert bench(*argv).code == 130
    sweep = find(bench.store, None)
    assert [(cell.method, cell.ratio, cell.samples) for cell in sweep.cells] == [
        (method, ratio, 3) for method in ("random", "fastv") for ratio in (0.5, 0.9)
    ]
    done = bench(*argv)
    assert [row["run_key"] for row in done.rows] == [cell.key for cell in sweep.cells]
    assert len(list(bench.store.glob("sweeps/*"))) == 1
    # The line of a cell runs it and no other.
    cell = sweep.cells[3]
    cached = bench(*[text for text in cell.line if not text.startswith("store=")])
    assert (cached.last["run_key"], cached.last["status"]) == (cell.key, "cached")
    (command,) = commands(sweep.cells)
    assert "method=random,fastv ratio=0.5,0.9" in command


@pytest.mark.slow
def test_a_failed_run_says_why_until_it_succeeds(bench: Bench) -> None:
    bench.fake.stop_after = 1
    bench.fake.error = lambda: SampleErrors([Failure("t", 1, "E: x")], 3)
    failed = bench("method=random")
    assert failed.code == 1
    (entry,) = entries(bench.store)
    cause = RunDir(entry.path).failure()
    assert entry.state == FAILED
    assert failed.err.splitlines()[-1] == f"error: {cause['cause']}"
    assert cause["error"] == "SampleErrors"
    assert "method=random" in cause["argv"]
    assert bench("method=random").code == 0
    (entry,) = entries(bench.store)
    assert entry.state == DONE
    assert {path.name for path in entry.path.iterdir()} == {
        *("journal.jsonl", "lock", "row.json", "spec.json")
    }
    assert not (bench.store / "sweeps").exists()
    # One that is interrupted has not failed.
    bench.fake.stop_after, bench.fake.error = 1, KeyboardInterrupt
    assert bench("method=fastv").code == 130
    assert {entry.state for entry in entries(bench.store)} == {DONE, UNFINISHED}


def test_a_row_tells_which_answers_it_is_of(bench: Bench) -> None:
    row = bench("method=random").last
    (entry,) = entries(bench.store)
    journal = Store(bench.store).run(entry.key).journal
    assert row["extra"]["answers"] == digest_of(journal_answers(journal.entries()))
    assert matches_row(row, journal.entries())
    journal.append({"task": row["benchmark"], "doc_id": 99, "answer": "more"})
    assert not matches_row(row, journal.entries())


def test_the_second_of_two_that_force_a_run_leaves_a_whole_journal(run: RunDir) -> None:
    answers = {("t", number): f"a{number}" for number in range(3)}
    row = {"schema": SCHEMA, "run_key": "k1", "extra": {"answers": digest_of(answers)}}

    def answer(number: int) -> None:
        run.forced.append({"task": "t", "doc_id": number, "answer": f"a{number}"})

    for number in range(3):
        answer(number)
    run.commit(row, forced=True)
    # Another owner, evicted in mid-run, goes on where it was: its former answers went with the first commit.
    answer(2)
    run.commit(row, forced=True)
    assert journal_answers(run.journal.entries()) == answers
    assert run.forced.files() == []
    assert json.loads((run.path / "row.json").read_text()) == row
