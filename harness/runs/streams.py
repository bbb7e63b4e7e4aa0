"""Standard streams of a command: streams that cannot take a line, signals that stop it, a line for its current step.

Nothing slow is imported here, because the line is shown before slow imports.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType, TracebackType
from typing import TextIO

from espalier.harness.errors import plain
from espalier.harness.specs.commands import discard, print_error, speak_plainly

__all__ = [
    "OutputLost",
    "StatusLine",
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


class StatusLine(AbstractContextManager["StatusLine"]):
    """A temporary line on standard error; nothing without a terminal.

    Args:
        stream: output; standard error if None.
        quiet: show nothing, as in all but the first of several processes.
    """

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        terminal = self._stream is not None and self._stream.isatty()
        self._live = terminal and not quiet and os.environ.get("TERM") not in ("dumb", "unknown")
        self._shown = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()

    def say(self, text: str) -> None:
        """Show a text in place of the previous one."""
        # Return the cursor to the margin, so that output of a library overwrites the text.
        self._write(f"\r{text[: self._width() - 1]}\x1b[K\r")
        self._shown = True

    def clear(self) -> None:
        """Remove the line; the next output takes its place."""
        if self._shown:
            self._write("\r\x1b[K")
            self._shown = False

    def _width(self) -> int:
        with suppress(OSError, ValueError):
            # A terminal of unknown width reports 0.
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        return 80

    def _write(self, text: str) -> None:
        if self._live:
            with suppress(OSError):
                self._stream.write(text)
                self._stream.flush()
