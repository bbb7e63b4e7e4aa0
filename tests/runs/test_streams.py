"""Signals, standard streams and the line of the current step by themselves, without a run."""

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
from espalier.harness.runs.streams import OutputLost, StatusLine, Stopped, stoppable
from tests.runs.terminal import Terminal, screen

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


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def test_it_comes_changes_and_goes_also_before_an_error() -> None:
    stream = Terminal()

    def fail() -> None:
        with StatusLine(stream) as waiting:
            for text in ("loading a lot of things", "checking"):
                waiting.say(text)
                assert screen(stream.getvalue(), 80) == [text]
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    assert screen(stream.getvalue(), 80) == [""]
    assert "\n" not in stream.getvalue()


def test_a_line_that_is_too_long_does_not_wrap() -> None:
    stream = Terminal()
    StatusLine(stream).say("x" * 200)
    assert [len(line) for line in screen(stream.getvalue(), 80)] == [79]


@pytest.mark.parametrize("why", ["no terminal", "quiet", "dumb"])
def test_it_is_silent_where_nobody_reads_it(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO() if why == "no terminal" else Terminal()
    if why == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    with StatusLine(stream, quiet=why == "quiet") as waiting:
        waiting.say("anything")
    assert stream.getvalue() == ""


def test_a_stream_that_takes_nothing_is_no_error() -> None:
    class Full(Terminal):
        def write(self, text: str) -> int:
            raise OSError(28, "full")

    with StatusLine(Full()) as waiting:
        waiting.say("anything")
