"""Leases: one owner at a time among machines that share only files; the dead lose theirs, the living do not."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from espalier.harness.errors import StoreLost
from espalier.harness.store import RunDir, Store, claims
from espalier.harness.store.claims import tidy
from espalier.harness.store.files import durable, lease
from espalier.harness.store.files.lease import (
    STALE_FACTOR,
    Lease,
    LeaseState,
    OwnerWatch,
    Terms,
    create,
    file_time,
    read_lease,
    successor,
    take,
)
from tests.refused import refused

QUICK = Terms(beat=0.05, expiry=3.0)


def elsewhere(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str) -> None:
    """Make this process one of another machine: its kernel has another name, and its locks lie elsewhere."""
    plain = claims.FileLock
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(durable, "kernel", lambda: name)
    monkeypatch.setattr(
        claims,
        "FileLock",
        lambda path, **more: plain(folder / f"{Path(path).parent.name}.lock", **more),
    )


def in_process(target: Any, *arguments: Any) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    return process


def hold_run(root: Path, locks: Path | None, name: str, ready: Any, leave: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if locks is not None:
            elsewhere(patch, locks, name)
        with Store(root).run("k1").claim(0, QUICK) as claimed:
            assert claimed
            ready.set()
            leave.wait(60)


@pytest.fixture
def owner(tmp_path: Path) -> Any:
    """A process of another machine that computes run k1, and what lets it end."""
    context = multiprocessing.get_context("fork")
    ready, leave = context.Event(), context.Event()
    process = in_process(hold_run, tmp_path / "store", tmp_path / "there", "0000000a", ready, leave)
    assert ready.wait(120)
    yield process, leave
    process.kill()
    process.join()


def claimed(run: RunDir, patience: float) -> bool:
    with run.claim(patience, QUICK) as claimed:
        return claimed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lease"


@pytest.mark.slow
def test_a_living_owner_of_another_machine_keeps_its_run(tmp_path: Path, owner: Any) -> None:
    run = Store(tmp_path / "store").run("k1")
    assert not claimed(run, 0)
    assert not claimed(run, 2 * QUICK.expiry)
    owner[1].set()
    owner[0].join()
    assert owner[0].exitcode == 0
    assert not (run.path / "lease").exists()
    assert claimed(run, 0)
    # No owner was evicted: the journals are unchanged.
    assert list(run.path.glob("*.take*")) == []


@pytest.mark.slow
def test_a_dead_owner_of_another_machine_loses_its_run_and_gets_a_journal_of_its_own(
    tmp_path: Path, owner: Any
) -> None:
    run = Store(tmp_path / "store").run("k1")
    run.journal.append({"doc_id": 0})
    before = run.journal.of_rank(0)
    owner[0].kill()
    owner[0].join()
    assert not claimed(run, 0)  # not known yet
    start = time.monotonic()
    assert claimed(run, 0.01)  # no patience with the living, but the silent one is watched
    assert QUICK.expiry <= time.monotonic() - start
    for journal, number in ((before, 1), (run.journal.of_rank(0), 2), (run.journal.of_rank(1), 3)):
        journal.append({"doc_id": number})
    names = {"journal.jsonl": 2, "journal.take1.jsonl": 1, "journal.take1.rank1.jsonl": 1}
    assert {path.name: len(path.read_text().splitlines()) for path in run.journal.files()} == names
    assert sorted(entry["doc_id"] for entry in run.journal.entries()) == [0, 1, 2, 3]
    run.journal.clear()
    assert run.journal.files() == []


def test_a_dead_process_of_this_machine_leaves_its_run_at_once(run: RunDir, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, leave = context.Event(), context.Event()
    process = in_process(hold_run, tmp_path, None, "", ready, leave)
    assert ready.wait(120)
    process.kill()
    process.join()
    foreign = f".row.json-0000000b-{'0' * 32}"
    (run.path / f".row.json-{durable.kernel()}-{'0' * 32}").write_text("half a row")
    (run.path / foreign).write_text("of a writer that may be alive")
    assert read_lease(run.path / "lease") is not None
    with run.claim(0) as held:  # the usual terms: a minute
        assert held
    assert sorted(path.name for path in run.path.iterdir()) == [foreign, "lock"]


def test_an_old_lease_need_not_be_watched_and_no_clock_is_read(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text('{"expiry": 5, "kernel": "0000000a"}\n', encoding="utf-8")
    state = read_lease(path)
    assert state is not None
    monkeypatch.setattr(time, "time", lambda: 4e9)  # a clock that is decades ahead
    assert not OwnerWatch(path, QUICK).dead(state)
    assert OwnerWatch(path, QUICK).dead(dead(path))
    assert [file.name for file in tmp_path.iterdir()] == ["lease"]


def test_the_owner_says_how_long_it_may_be_silent(tmp_path: Path) -> None:
    os.close(create(tmp_path / "lease", Terms(1, 30), {"more": 1}))
    state = read_lease(tmp_path / "lease")
    assert (state.expiry(5), state.owner["more"], state.owner["pid"]) == (30, 1, os.getpid())
    assert LeaseState(1, 1, 0.0, {"expiry": "soon"}).expiry(5) == 5


def dead(path: Path, name: str = "0000000a") -> LeaseState:
    """Leave the lease of an owner that died long ago on another machine."""
    path.write_text(json.dumps({"kernel": name, "id": uuid4().hex}) + "\n", encoding="utf-8")
    old = file_time(path.parent) - STALE_FACTOR * QUICK.expiry - 2
    os.utime(path, (old, old))
    return read_lease(path)


def take_lease(path: Path, terms: Terms = QUICK) -> tuple[Lease | None, bool]:
    return take(path, terms, 0, sole_process=False, extra={})


def takers(count: int, path: Path) -> list[tuple[Lease, bool]]:
    """Return what those got, of `count` threads that begin together, who got the lease."""
    start, leases = threading.Barrier(count), []

    def follow() -> None:
        start.wait()
        leases.append(take_lease(path))

    threads = [threading.Thread(target=follow) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [(taken, foreign) for taken, foreign in leases if taken is not None]


@pytest.mark.parametrize("died_on_the_way", [0, 1, 2])
def test_of_many_that_follow_a_dead_owner_one_gets_the_run(
    path: Path, tmp_path: Path, died_on_the_way: int
) -> None:
    for _ in range(30):
        state = dead(path)
        for _ in range(died_on_the_way):
            state = dead(successor(path, state), "0000000b")
        ((claimed, foreign),) = takers(8, path)
        assert foreign
        assert claimed.is_held
        assert [file.name for file in tmp_path.iterdir()] == ["lease"]
        claimed.release()
        assert list(tmp_path.iterdir()) == []


def test_whoever_comes_too_late_takes_its_file_back(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = dead(path)
    plain, others = os.open, []

    def late(name: Path, *flags: int) -> int:
        if name == successor(path, state) and not others:
            others.append(None)
            others[0] = take_lease(path)[0]  # another was quicker
        return plain(name, *flags)

    monkeypatch.setattr(os, "open", late)
    assert take_lease(path) == (None, False)
    assert others[0].is_held
    assert [file.name for file in tmp_path.iterdir()] == ["lease"]
    others[0].release()


def test_an_owner_that_beats_at_the_last_moment_keeps_its_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = dead(path)
    plain = os.open

    def awake(name: Path, *flags: int) -> int:
        if name == successor(path, state):
            with path.open("a", encoding="utf-8") as file:
                file.write(".")
        return plain(name, *flags)

    monkeypatch.setattr(os, "open", awake)
    assert take_lease(path) == (None, False)
    assert [file.name for file in tmp_path.iterdir()] == ["lease"]


def test_what_a_late_follower_left_goes_with_the_next_owner(run: RunDir) -> None:
    (run.path / f"lease.{uuid4().hex}").write_text("{}\n")
    assert claimed(run, 0)
    assert [file.name for file in run.path.iterdir()] == ["lock"]


def test_an_owner_that_died_after_its_row_leaves_nothing(run: RunDir) -> None:
    tidy(run.path, QUICK)
    assert list(run.path.iterdir()) == []
    os.close(create(run.path / "lease", QUICK, {}))
    tidy(run.path, QUICK)
    assert [file.name for file in run.path.iterdir()] == ["lock"]


def test_an_owner_that_is_followed_says_so_and_leaves_the_other_alone(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = take_lease(path)
    path.unlink()  # as if it had been called dead
    second, _ = take_lease(path, Terms())
    end = time.monotonic() + 120
    line = ""
    while not line and time.monotonic() < end:
        time.sleep(0.02)
        line = capsys.readouterr().err
    assert line == (
        f"run {tmp_path} was taken over by another command; both continue, and either row is complete\n"
    )
    first.release()
    assert second.is_held
    second.release()
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b'{"kern', b"[1]\n", b"\xff\n..."])
def test_a_torn_lease_is_that_of_an_owner_nobody_knows(run: RunDir, content: bytes) -> None:
    (run.path / "lease").write_bytes(content)
    assert not claimed(run, 0)
    assert claimed(run, 1)


def test_terms_that_cannot_work_are_one_line() -> None:
    assert "lease.expiry=5 must be at least 3 times lease.beat=10" in refused(Terms, 10, 5)
    assert "lease.beat=0 must be above 0" in refused(Terms, 0, 5)


def test_a_disk_without_room_for_a_lease_is_one_line(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(lease.os, "fsync", full)
        with pytest.raises(StoreLost, match="k1 cannot be claimed: No space left"), run.claim(0):
            pass
    assert not (run.path / "lease").exists()
    assert claimed(run, 0)


def test_a_lease_says_who_holds_the_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    run.journal.append({"doc_id": 0})
    with run.claim(0, QUICK) as claimed:
        assert claimed
        line = json.loads((run.path / "lease").read_text().splitlines()[0])
    size = run.journal.path.stat().st_size
    assert (line["job"], line["journal_bytes"], line["expiry"]) == ("17", size, QUICK.expiry)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "16")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert durable.this_process()["job"] == "16_3"


@pytest.mark.slow
def test_whoever_does_not_get_a_run_holds_nothing_of_it(tmp_path: Path, owner: Any) -> None:
    run = Store(tmp_path / "store").run("k1")
    with run.claim(0, QUICK) as first, run.claim(0, QUICK) as second:
        assert not first
        assert not second
        # The runner asks again while it is inside: its own first attempt must not be in the way.
        owner[0].kill()
        owner[0].join()
        with run.claim(30, QUICK) as third:
            assert third
