"""Trouble from outside, with real processes: signals, two commands at once, a full disk, output that goes nowhere."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import espalier.harness.evaluation.evaluate
from espalier.harness.paths import ROOT
from espalier.harness.runs.streams import Stopped, stoppable
from espalier.harness.store import Store
from espalier.harness.store.files import durable
from tests.runs.helpers import make_bench

#: run.py with answers that take a while, and the fifth of them longer than any test waits: it does not end by itself.
SLOW = """
import sys, time
from itertools import chain, repeat
import run
from espalier.harness.engine.session import Session
plain, pauses = Session.generate, chain(4 * [0.5], repeat(600))
def generate(*inputs, **settings):
    time.sleep(next(pauses))
    return plain(*inputs, **settings)
Session.generate = generate
sys.exit(run.main())
"""
CELL = ("method=random", "limit=40", "engine.batch_size=2", "model.device=cpu")


def begin(*command: str, **more: Any) -> subprocess.Popen[str]:
    """Start Python with a command line; stderr is kept."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *command],
        stderr=subprocess.PIPE,
        text=True,
        env=environment | more.pop("env", {}),
        **more,
    )


def wait_for(condition: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one row, made by a command that took over from one that was terminated."""
    folder = tmp_path_factory.mktemp("trouble")
    script = folder / "slow.py"
    script.write_text(SLOW)
    root, lines = folder / "store", folder / "lines"
    first = begin(str(script), f"store={root}", *CELL, stdout=subprocess.DEVNULL)
    wait_for(lambda: list(root.glob("runs/*/journal.jsonl")))
    with lines.open("w") as stream:
        command = [sys.executable, str(ROOT / "run.py"), f"store={root}", *CELL]
        second = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stream)
        try:
            wait_for(lambda: "waiting" in lines.read_text())
            (path,) = root.glob("runs/*/journal.jsonl")
            before = len(path.read_text().splitlines())
            first.send_signal(signal.SIGTERM)
            complaint = first.communicate(timeout=300)[1]
            assert first.returncode == 143
            advice = "terminated; finished samples are kept, the same command goes on from them"
            assert complaint.splitlines() == [f"error: {advice}"]
            assert second.wait(timeout=300) == 0
        finally:
            first.kill()
            second.kill()
    (line,) = lines.read_text().splitlines()
    assert line == f"waiting: another command computes run {path.parent}"
    (row,) = Store(root).rows()
    assert row["status"] == "resumed"
    assert 2 <= before <= row["extra"]["resumed_samples"] < 40
    return root


@pytest.mark.exhaustive
def test_a_terminated_run_keeps_its_answers_and_a_waiting_command_goes_on(store: Path) -> None:
    assert len(Store(store).rows()) == 1  # the fixture has looked closely


@pytest.mark.exhaustive
def test_output_that_goes_nowhere_is_one_line(store: Path) -> None:
    command = (str(ROOT / "run.py"), f"store={store}", *CELL)
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w", encoding="utf-8") as full, os.fdopen(writer, "w") as broken:
        jobs = {
            "No space left on device": begin(*command, stdout=full),
            "Broken pipe": begin(*command, stdout=broken),
        }
        plain = begin(*command, stdout=subprocess.PIPE, env={"PYTHONIOENCODING": "ascii"})
        for reason, job in jobs.items():
            complaint = job.communicate(timeout=300)[1]
            advice = "finished rows are in the store, the same command prints them"
            assert complaint.splitlines() == [f"error: standard output: {reason}; {advice}"]
            assert job.returncode == 1
        out, complaint = plain.communicate(timeout=300)
    assert (plain.returncode, complaint) == (0, "")
    assert "\\xb1" in out  # the sign before a standard error


@pytest.mark.exhaustive
def test_a_home_that_cannot_be_written_is_not_blamed_on_the_benchmark(tmp_path: Path) -> None:
    bare = {"HOME": "/dev/null/home", "HF_HOME": "", "HF_DATASETS_CACHE": "", "XDG_CACHE_HOME": ""}
    environment = {k: v for k, v in os.environ.items() if k not in bare}
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), f"store={tmp_path}", *CELL],
        env=environment | {"HOME": bare["HOME"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: HF_DATASETS_CACHE, HF_HOME or HOME: folder '/dev/null/home")
    assert "benchmark" not in line


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a disk of 256 KiB on a folder; skips where that is not allowed."""
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def spoiled(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[], None]
) -> contextlib.AbstractContextManager[None]:
    """Let something happen when two samples are finished."""
    plain = espalier.harness.evaluation.evaluate.evaluate

    def progress(finished: int, total: int) -> None:
        if finished == 2:
            spoil()

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(
                espalier.harness.evaluation.evaluate,
                "evaluate",
                lambda *args, **more: plain(*args[:4], progress, **more),
            )
            yield

    return block()


@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_a_disk_that_fails_in_mid_run_loses_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    trouble: str,
) -> None:
    root = tmp_path / "disk"
    bench = make_bench(root / "store", capsys, monkeypatch)
    filler = root / "filler"

    def fill() -> None:
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with contextlib.ExitStack() as stack:
        if trouble == "full":
            stack.enter_context(small_disk(root))
            with spoiled(monkeypatch, fill):
                done = bench("method=fastv")
            filler.unlink()
        else:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            with spoiled(monkeypatch, lambda: patch.setattr(durable.os, "write", refuse)):
                done = bench("method=fastv")
            patch.undo()
        assert (done.code, done.out) == (1, "")
        reason = {"full": "No space left on device", "read-only": "Read-only file system"}[trouble]
        line = done.err.splitlines()[-1]
        assert line.startswith("error: store: ")
        assert f"cannot be written: {reason}; finished samples are kept" in line
        again = bench.success("method=fastv")
        assert again.last["extra"]["resumed_samples"] >= 2


@pytest.mark.parametrize("swallow", [False, True])
def test_a_signal_counts_even_where_a_library_turns_it_into_something_else(swallow: bool) -> None:
    def clean_up() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except KeyboardInterrupt:
            if not swallow:
                raise RuntimeError("cleaning up failed") from None

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match="terminated") as stopped, stoppable():
        clean_up()
    assert stopped.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
