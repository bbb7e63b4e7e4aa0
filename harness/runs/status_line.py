"""A line on the terminal that shows what a command is doing before it has other output.

Only the standard library is imported here, because the line is shown before slow imports.
"""

from __future__ import annotations

import os
import sys
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

    def __enter__(self) -> StatusLine:
        return self

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
