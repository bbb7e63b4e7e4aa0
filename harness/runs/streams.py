"""Output streams that cannot take a line, and the signals that stop a command."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from espalier.harness.errors import plain
from espalier.harness.specs.commands import discard, print_error, speak_plainly

__all__ = [
    "OutputLost",
    "Stopped",
    "discard",
    "flush",
    "output",
    "print_error",
    "speak_plainly",
    "stoppable",
    "tell",
]


class OutputLost(RuntimeError):
    """Standard output accepts nothing more: its disk is full, or its reader closed it. Rows are stored before."""


class Stopped(KeyboardInterrupt):
    """A signal stops the command: Ctrl-C, or SIGTERM, which a cluster sends before it kills."""

    def __init__(self, number: int) -> None:
        """Store the number of the signal."""
        self.code = 128 + number
        super().__init__("terminated" if number == signal.SIGTERM else "interrupted")


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn SIGTERM and Ctrl-C into `Stopped` inside the block; no effect outside the main thread.

    A signal can arrive during the cleanup of any library, which may raise its own error instead, or none at all. So the
    signal is remembered, and the block ends with `Stopped` in any case.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise Stopped(number)

    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    # Signals ignored by a background job or under nohup stay ignored.
    handled = [number for number, handler in former.items() if handler is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, stop)
    try:
        yield
    except Exception as error:
        if received:
            raise Stopped(received[0]) from error
        raise
    finally:
        for number in handled:
            signal.signal(number, former[number])
    if received:
        raise Stopped(received[0])


@contextmanager
def output() -> Iterator[None]:
    """Turn errors of standard output inside the block into `OutputLost`; the block should only print.

    The remaining buffer is discarded, so that Python does not fail again at exit.
    """
    try:
        yield
    except (OSError, SystemExit) as error:
        # rich raises SystemExit when a pipe is closed.
        reason = error.strerror if isinstance(error, OSError) else "Broken pipe"
        discard(sys.stdout)
        raise OutputLost(
            f"standard output: {reason}; finished rows are in the store, the same command prints them"
        ) from error


def flush() -> None:
    """Flush standard output; raises `OutputLost`."""
    with output():
        sys.stdout.flush()


def tell(line: str) -> None:
    """Print a line that is not an error on stderr, if stderr accepts it."""
    try:
        print(plain(line), file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)
