"""A line on the terminal that shows a command's current step before it has other output.

Only the standard library is imported here, because the line is shown before slow imports.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import TextIO


class StatusLine:
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
        self._lock = threading.Lock()
        self._clock = threading.Event()

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()

    def say(self, text: str, clock: bool = False) -> None:
        """Show a text in place of the previous one; with `clock` the seconds that it has stood, once a second."""
        with self._lock:
            self._clock.set()
            self._show(text)
            self._shown = True
        if clock and self._live:
            self._clock = threading.Event()
            arguments = (text, self._clock, time.monotonic())
            threading.Thread(target=self._tick, args=arguments, daemon=True).start()

    def clear(self) -> None:
        """Remove the line; the next output takes its place."""
        with self._lock:
            self._clock.set()
            if self._shown:
                self._write("\r\x1b[K")
                self._shown = False

    def _show(self, text: str) -> None:
        # Return the cursor to the margin, so that output of a library overwrites the text.
        self._write(f"\r{text[: self._width() - 1]}\x1b[K\r")

    def _tick(self, text: str, ended: threading.Event, start: float) -> None:
        while not ended.wait(1):
            with self._lock:
                if not ended.is_set():
                    self._show(f"{text}, {time.monotonic() - start:.0f} s")

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
