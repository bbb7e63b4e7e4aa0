"""One line on a terminal that says what goes on while there is nothing else to show.

Only the standard library is imported here: the line stands before anything is loaded that takes seconds.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import TracebackType
from typing import TextIO


class Waiting:
    """A line on standard error that comes and goes; nothing where that is no terminal.

    Args:
        stream: where it is shown; standard error if None.
        quiet: whether to show nothing at all, as the second of several processes.
    """

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        terminal = self._stream is not None and self._stream.isatty()
        self._live = terminal and not quiet and os.environ.get("TERM") not in ("dumb", "unknown")
        self._shown = False

    def __enter__(self) -> Waiting:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()

    def say(self, text: str) -> None:
        """Show a text in place of the last one."""
        # The cursor goes back to the margin: what a library prints then stands over the text, not behind it.
        self._write(f"\r{text[: self._width() - 1]}\x1b[K\r")
        self._shown = True

    def clear(self) -> None:
        """Take the line away; what is printed next stands in its place."""
        if self._shown:
            self._write("\r\x1b[K")
            self._shown = False

    def _width(self) -> int:
        with suppress(OSError, ValueError):
            # A terminal that does not know its width says 0.
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        return 80

    def _write(self, text: str) -> None:
        if self._live:
            with suppress(OSError):
                self._stream.write(text)
                self._stream.flush()
