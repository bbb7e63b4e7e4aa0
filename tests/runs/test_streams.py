"""Signals and standard streams by themselves, without a run: what a command turns them into, and gives back."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from espalier.harness.runs import streams
from espalier.harness.runs.model_pool import threads
from espalier.harness.runs.streams import OutputLost, Stopped, stoppable

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Start from the usual ones, whatever the test run ignores, and put back what was there."""
    former = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_signal_ends_the_block_with_the_code_of_shells(number: int, code: int, word: str) -> None:
    with pytest.raises(Stopped) as stopped, stoppable():
        signal.raise_signal(number)
    assert (stopped.value.code, str(stopped.value)) == (code, word)


def test_errors_without_a_signal_stay_what_they_are() -> None:
    with pytest.raises(ValueError, match="mine"), stoppable():
        raise ValueError("mine")


def test_handlers_come_back_and_what_was_ignored_stays_ignored() -> None:
    def mine(*arguments: object) -> None:
        raise AssertionError

    signal.signal(signal.SIGTERM, mine)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stoppable():
        assert signal.getsignal(signal.SIGTERM) is not mine
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is mine


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SystemExit(1)])
def test_output_that_is_refused_is_lost_and_goes_nowhere_from_then_on(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[object] = []
    monkeypatch.setattr(streams, "discard", gone.append)
    reason = "No space left" if isinstance(error, OSError) else "Broken pipe"
    with pytest.raises(OutputLost, match=f"^standard output: {reason}"), streams.output():
        raise error
    assert gone == [sys.stdout]


def test_discarded_streams_take_everything() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        stream.write("unseen")
        streams.discard(stream)
        stream.write(" and more")
    with os.fdopen(reading) as end:
        assert end.read() == ""
    streams.discard(io.StringIO())  # has no file


def test_a_complaint_is_one_line_or_none_where_it_cannot_be_made(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams.print_error(ValueError("several\n  lines"))
    assert capsys.readouterr().err == "error: several lines\n"

    def refuse(text: str) -> int:
        raise OSError(28, "full")

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=refuse, flush=lambda: None))
    streams.print_error("anything")


def test_what_an_encoding_lacks_is_escaped() -> None:
    code = "from espalier.harness.runs.streams import *; speak_plainly(); print('\\u00b1')"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"\\xb1\n")


def test_threads_are_those_of_before_after_a_run() -> None:
    before = torch.get_num_threads()
    for number in (before + 2, None):
        with threads(number):
            assert torch.get_num_threads() == number or before
        assert torch.get_num_threads() == before
