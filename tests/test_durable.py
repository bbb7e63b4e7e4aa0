"""Durable writes: the order of writes, flushes and renames, call by call."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.errors import StoreLost
from espalier.harness.store import Store
from espalier.harness.store.files import durable
from espalier.harness.store.files.journal import Journal


class Calls:
    """Notes what the system is asked, as `<call> <file name>`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self._names: dict[int, str] = {}
        self._patch = monkeypatch
        for name in ("open", "write", "fsync", "replace"):
            self._watch(name, getattr(os, name))

    def _watch(self, name: str, plain: Callable[..., Any]) -> None:
        def call(first: Any, *rest: Any, **more: Any) -> Any:
            result = plain(first, *rest, **more)
            if name == "open":
                self._names[result] = Path(first).name
            elif name == "replace":
                self.seen.append(f"replace {Path(rest[0]).name}")
            else:
                folder = stat.S_ISDIR(os.fstat(first).st_mode)
                self.seen.append(f"{name} {'folder' if folder else 'file'}")
            return result

        self._patch.setattr(durable.os, name, call)

    def taken(self) -> list[str]:
        calls, self.seen = self.seen, []
        return calls


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    with monkeypatch.context() as patch:
        yield Calls(patch)


def test_an_entry_is_flushed_before_append_returns(journal: Journal, calls: Calls) -> None:
    journal.append({"doc_id": 0})
    # The name of a new file is not on the disk before its folder is.
    assert calls.taken() == ["write file", "fsync file", "fsync folder"]
    journal.append({"doc_id": 1}, {"doc_id": 2})
    assert calls.taken() == ["write file", "fsync file"]


def test_a_row_is_flushed_before_it_appears_and_its_name_after(
    tmp_path: Path, calls: Calls
) -> None:
    run = Store(tmp_path).run("k1")
    assert calls.taken() == ["fsync folder"]  # the new folder of the run
    run.commit({"n": 1})
    whole = ["write file", "fsync file", "replace row.json", "fsync folder"]
    assert calls.taken() == whole
    run.forced.append({"doc_id": 0})
    calls.taken()
    run.commit({"n": 2}, forced=True)
    journal = [call.replace("row.json", "journal.jsonl") for call in whole]
    assert calls.taken() == [*journal, *whole]


def test_a_disk_that_takes_only_part_gets_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.write
    monkeypatch.setattr(durable.os, "write", lambda file, data: plain(file, data[:3]))
    durable.replace(tmp_path / "row.json", b"0123456789")
    durable.append(tmp_path / "journal.jsonl", "one\ntwo\n")
    assert (tmp_path / "row.json").read_bytes() == b"0123456789"
    assert (tmp_path / "journal.jsonl").read_text() == "one\ntwo\n"


@pytest.mark.parametrize("fails", ["open", "write", "fsync", "replace"])
def test_a_failing_disk_is_one_line_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    path = tmp_path / "row.json"
    durable.replace(path, b"old")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable.os, fails, full)
        with pytest.raises(StoreLost, match=r"row\.json cannot be written: No space left"):
            durable.replace(path, b"new")
        if fails != "replace":
            with pytest.raises(StoreLost, match=r"journal\.jsonl cannot be written: No space"):
                durable.append(tmp_path / "journal.jsonl", "line\n")
    assert path.read_bytes() == b"old"
    assert {file.name for file in tmp_path.iterdir()} <= {"row.json", "journal.jsonl"}
