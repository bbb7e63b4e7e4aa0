"""The store: journals survive torn lines, rows appear whole, many writers do not disturb each other."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from harness.store import SCHEMA, Journal, Store


def row(key: str, **more: Any) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "run_key": key,
        "metrics": {"acc": {"value": 0.5, "stderr": None}},
        **more,
    }


def test_journal_returns_entries_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    assert journal.entries() == []
    journal.append({"doc_id": 0}, {"doc_id": 1})
    journal.append({"doc_id": 2, "answer": "line\nbreak é"})
    assert [entry["doc_id"] for entry in journal.entries()] == [0, 1, 2]
    assert journal.entries()[2]["answer"] == "line\nbreak é"
    assert len(journal) == 3


def test_empty_append_leaves_the_journal_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append()
    assert journal.entries() == []


@pytest.mark.parametrize("cut", range(1, 20))
def test_torn_last_line_is_dropped_and_the_next_entry_stays_whole(tmp_path: Path, cut: int) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append({"doc_id": 0})
    whole = journal.path.read_bytes()
    torn = json.dumps({"doc_id": 1, "a": "{}"}).encode()
    assert cut < len(torn)
    journal.path.write_bytes(whole + torn[:cut])
    assert [entry["doc_id"] for entry in journal.entries()] == [0]
    journal.append({"doc_id": 2})
    assert [entry["doc_id"] for entry in journal.entries()] == [0, 2]


def test_line_that_lacks_only_its_end_counts(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.path.write_bytes(b'{"doc_id": 0}')
    journal.append({"doc_id": 1})
    assert [entry["doc_id"] for entry in journal.entries()] == [0, 1]


def test_journal_refuses_nan(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        journal.append({"doc_id": 0, "score": float("nan")})
    assert journal.entries() == []


def test_row_is_none_until_committed_and_the_last_commit_stands(tmp_path: Path) -> None:
    run = Store(tmp_path).run("k1")
    assert run.row() is None
    run.commit(row("k1", n=1))
    run.commit(row("k1", n=2))
    assert run.row() == row("k1", n=2)
    assert sorted(os.listdir(run.path)) == ["row.json"]


def test_failed_commit_leaves_no_trace(tmp_path: Path) -> None:
    run = Store(tmp_path).run("k1")
    with pytest.raises(ValueError, match="JSON"):
        run.commit(row("k1", bad=float("inf")))
    assert run.row() is None
    assert os.listdir(run.path) == []


def test_damaged_and_newer_rows_are_refused(tmp_path: Path) -> None:
    run = Store(tmp_path).run("k1")
    (run.path / "row.json").write_text('{"schema": 1, ')
    with pytest.raises(UserError, match=r"damaged.*force=true"):
        run.row()
    run.commit(row("k1", schema=SCHEMA + 1))
    with pytest.raises(UserError, match=f"schema {SCHEMA + 1}"):
        run.row()


def _commit_many(root: Path, writer: int) -> None:
    run = Store(root).run("shared")
    for turn in range(20):
        run.journal.append({"writer": writer, "turn": turn, "padding": "x" * 300})
        run.commit(row("shared", writer=writer, turn=turn, padding=["y"] * 300))


def test_writers_at_once_leave_whole_lines_and_a_whole_row(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_commit_many, args=(tmp_path, number)) for number in range(3)]
    for process in writers:
        process.start()
    store = Store(tmp_path)
    while any(process.is_alive() for process in writers):
        store.run("shared").row()  # raises if it ever sees half a row
    assert [process.exitcode for process in writers] == [0, 0, 0]
    entries = store.run("shared").journal.entries()
    assert sorted((e["writer"], e["turn"]) for e in entries) == [
        (w, t) for w in range(3) for t in range(20)
    ]
    final = store.run("shared").row()
    assert final is not None
    assert final["turn"] == 19


def test_store_that_cannot_be_written_names_the_config_key(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    for act in (Store(blocked).check_writable, lambda: Store(blocked).run("k1")):
        with pytest.raises(
            UserError, match=r"store=.*cannot be written.*valid: a writable directory"
        ):
            act()


def test_check_writable_leaves_nothing_behind(tmp_path: Path) -> None:
    Store(tmp_path).check_writable()
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]


def test_load_gives_one_flat_line_for_each_finished_run(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.load().empty
    store.run("b").commit(row("b", extra={"environment": {"torch": "2"}, "sites": [1, 2]}))
    store.run("a").commit(row("a"))
    store.run("unfinished").journal.append({"doc_id": 0})
    frame = store.load()
    assert list(frame["run_key"]) == ["a", "b"]
    assert list(frame["metrics.acc.value"]) == [0.5, 0.5]
    assert frame.loc[1, "extra.environment.torch"] == "2"
    assert frame.loc[1, "extra.sites"] == [1, 2]
