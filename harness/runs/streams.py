"""How a command speaks and ends: streams that cannot take a line, and the signals that ask it to stop."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from espalier.harness.errors import plain
from espalier.harness.specs.commands import complain, discard, speak_plainly

__all__ = [
    "OutputLost",
    "Stopped",
    "complain",
    "discard",
    "flush",
    "output",
    "speak_plainly",
    "stoppable",
    "tell",
]


class OutputLost(RuntimeError):
    """Standard output takes nothing more: its disk is full, or whoever read it has gone. Rows are stored before."""


class Stopped(KeyboardInterrupt):
    """A signal asks the command to end: Ctrl-C, or SIGTERM, which a cluster sends before it kills."""

    def __init__(self, number: int) -> None:
        """Take the number of the signal."""
        self.code = 128 + number
        super().__init__("terminated" if number == signal.SIGTERM else "interrupted")


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn SIGTERM and Ctrl-C into `Stopped` inside the block; elsewhere than in the main thread nothing.

    A signal may strike inside the cleaning up of any library, whose own error then comes in its place, or none at all.
    So the signal is remembered, and the block ends with `Stopped` in any case.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise Stopped(number)

    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    # What a shell started in the background, or under nohup, ignores stays ignored.
    taken = [number for number, handler in former.items() if handler is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    except Exception as error:
        if came:
            raise Stopped(came[0]) from error
        raise
    finally:
        for number in taken:
            signal.signal(number, former[number])
    if came:
        raise Stopped(came[0])


@contextmanager
def output() -> Iterator[None]:
    """Turn what standard output refuses inside the block into `OutputLost`; nothing but printing belongs there.

    What is still in its buffer goes nowhere from then on, so that Python does not fail again at its end.
    """
    try:
        yield
    except (OSError, SystemExit) as error:
        # rich leaves by SystemExit when a pipe is closed.
        reason = error.strerror if isinstance(error, OSError) else "Broken pipe"
        discard(sys.stdout)
        raise OutputLost(
            f"standard output: {reason}; finished rows are in the store, the same command prints them"
        ) from error


def flush() -> None:
    """Hand on what was printed; raises `OutputLost`."""
    with output():
        sys.stdout.flush()


def tell(line: str) -> None:
    """Print a line that is no error on stderr, if stderr takes it."""
    try:
        print(plain(line), file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)
