"""How a command speaks and ends: streams that cannot take a line, and the signals that ask it to stop."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class OutputLost(RuntimeError):
    """Standard output takes nothing more: its disk is full, or whoever read it has gone. Rows are stored before."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came, as a cluster sends it before it kills; ends a run exactly as Ctrl-C does."""


@contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM into `Terminated` inside the block; a no-op outside the main thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def output() -> Iterator[None]:
    """Turn what standard output refuses inside the block into `OutputLost`; nothing but printing belongs there.

    What is still in its buffer goes nowhere from then on, so that Python does not fail again at its end.
    """
    try:
        yield
    except OSError as error:
        discard(sys.stdout)
        raise OutputLost(
            f"standard output: {error.strerror or error}; finished rows are in the store, "
            "the same command prints them"
        ) from error


def flush() -> None:
    """Hand on what was printed; raises `OutputLost`."""
    with output():
        if sys.stdout is not None:
            sys.stdout.flush()


def complain(problem: object) -> None:
    """Print an error as one line on stderr, if stderr takes it."""
    try:
        print(f"error: {' '.join(str(problem).split())}", file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: object) -> None:
    """Let all that a standard stream has and gets go to /dev/null."""
    # A replaced stream, as in tests, has no file of its own.
    with suppress(AttributeError, io.UnsupportedOperation):
        file = stream.fileno()  # type: ignore[attr-defined]
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, file)
        os.close(null)


def speak_plainly() -> None:
    """Escape what the encoding of a standard stream lacks (`±` in ASCII) instead of failing on it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
