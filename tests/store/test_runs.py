"""The store: journals survive torn lines, rows appear at once, and parallel writers do not disturb each other."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.errors import UserError
from espalier.harness.store import SCHEMA, RunDir, Store
from espalier.harness.store.files.journal import Journal


def row(key: str, **more: Any) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "run_key": key,
        "model": "m",
        "method": "none",
        "benchmark": "b",
        "ratio": 0.0,
        "n_samples": 1,
        "extra": {},
        "metrics": {"acc": {"value": 0.5, "stderr": None}},
        **more,
    }


def test_journal_returns_entries_in_order(journal: Journal) -> None:
    assert journal.entries() == []
    journal.append({"doc_id": 0}, {"doc_id": 1})
    journal.append({"doc_id": 2, "answer": "line\nbreak é"})
    assert [entry["doc_id"] for entry in journal.entries()] == [0, 1, 2]
    assert journal.entries()[2]["answer"] == "line\nbreak é"
    assert len(journal) == 3


def test_empty_append_leaves_the_journal_alone(journal: Journal) -> None:
    journal.append()
    assert journal.entries() == []


@pytest.mark.parametrize("cut", range(1, 20))
def test_torn_last_line_is_dropped_and_the_next_entry_stays_whole(
    journal: Journal, cut: int
) -> None:
    journal.append({"doc_id": 0})
    content = journal.path.read_bytes()
    torn = json.dumps({"doc_id": 1, "a": "{}"}).encode()
    assert cut < len(torn)
    journal.path.write_bytes(content + torn[:cut])
    assert [entry["doc_id"] for entry in journal.entries()] == [0]
    journal.append({"doc_id": 2})
    assert [entry["doc_id"] for entry in journal.entries()] == [0, 2]


def test_line_that_lacks_only_its_end_counts(journal: Journal) -> None:
    journal.path.write_bytes(b'{"doc_id": 0}')
    journal.append({"doc_id": 1})
    assert [entry["doc_id"] for entry in journal.entries()] == [0, 1]


def test_journal_refuses_nan(journal: Journal) -> None:
    with pytest.raises(ValueError, match="JSON"):
        journal.append({"doc_id": 0, "score": float("nan")})
    assert journal.entries() == []


def test_row_is_none_until_committed_and_the_last_commit_stands(run: RunDir) -> None:
    assert run.row() is None
    run.commit(row("k1", n=1))
    run.commit(row("k1", n=2))
    assert run.row() == row("k1", n=2)
    assert sorted(os.listdir(run.path)) == ["row.json"]


def test_failed_commit_leaves_no_trace(run: RunDir) -> None:
    with pytest.raises(ValueError, match="JSON"):
        run.commit(row("k1", bad=float("inf")))
    assert run.row() is None
    assert os.listdir(run.path) == []


DEEP = b"[" * 100_000

#: What stands in the place of a row, and words of the line about it.
NO_ROWS = {
    "cut": (b'{"schema": 1, ', "damaged"),
    "junk": (b"\xff\xfe\x00", "damaged"),
    "list": (b"[1]", "not a table"),
    "deep": (DEEP, "damaged"),
    "future": (json.dumps(row("k1", schema=SCHEMA + 1)).encode(), f"schema {SCHEMA + 1}"),
    "schema": (json.dumps(row("k1", schema="1")).encode(), "no schema"),
    "block": (json.dumps(row("k1", tokens=[])).encode(), "tokens"),
    "count": (json.dumps(row("k1", n_samples="3")).encode(), "n_samples is '3'"),
    "foreign": (json.dumps(row("k2")).encode(), "is the row of run 'k2'"),
}


def spoil(run: RunDir, kind: str) -> None:
    """Put something else in the place of a row."""
    path = run.path / "row.json"
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)  # reading it blocks for ever
    else:
        path.write_bytes(NO_ROWS[kind][0])


@pytest.mark.parametrize("kind", [*NO_ROWS, "folder", "pipe"])
def test_what_is_no_row_is_refused_in_one_line_and_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    store = Store(tmp_path)
    store.run("k0").commit(row("k0"))
    spoil(store.run("k1"), kind)
    word = NO_ROWS.get(kind, (b"", "not a file"))[1]
    with pytest.raises(UserError, match=f"row.json .*{word}.*force=true") as refused:
        store.run("k1").row()
    for _ in range(2):  # the second reader of a process says nothing new
        assert [stored["run_key"] for stored in store.rows()] == ["k0"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"passed over: {refused.value}"


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
    assert final["turn"] == 19


def test_store_that_cannot_be_written_names_the_config_key(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    for act in (Store(blocked).check_writable, lambda: Store(blocked).run("k1")):
        with pytest.raises(
            UserError, match=r"store=.*cannot be written.*valid: a writable directory"
        ):
            act()


def test_the_disk_of_the_store_is_the_one_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tempfile.TemporaryFile

    def full(*arguments: Any, **more: Any) -> Any:
        if more.get("dir") == tmp_path / "runs":
            raise OSError(28, "No space left on device")
        return plain(*arguments, **more)

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(UserError, match="cannot be written: No space left"):
        Store(tmp_path).check_writable()


def test_check_writable_leaves_nothing_behind(tmp_path: Path) -> None:
    Store(tmp_path).check_writable()
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]
