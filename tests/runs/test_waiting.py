"""The line that stands while nothing else does."""

from __future__ import annotations

import io

import pytest

from espalier.harness.runs.streams import StatusLine
from tests.runs.terminal import Terminal, screen


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
