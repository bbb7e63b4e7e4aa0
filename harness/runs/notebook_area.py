"""Progress below the cell of a notebook, as plain text that is replaced: it needs no widgets."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, RenderableType

#: Updates of a display in a second.
REFRESHES = 4

#: Columns of text in a notebook.
WIDTH = 100


@dataclass
class NotebookArea:
    """Draws lines as text.

    Args:
        lines: the lines drawn.
        update: shows a text in place of the previous one.
        between: least seconds between two updates by `count`.
    """

    lines: RenderableType
    update: Callable[[str], None]
    between: float = 1 / REFRESHES
    _drawn: float = field(default=float("-inf"), init=False)

    def draw(self) -> None:
        """Show the current state."""
        console = Console(file=io.StringIO(), width=WIDTH, force_jupyter=False)
        with console.capture() as capture:
            console.print(self.lines)
        self.update(capture.get())
        self._drawn = time.monotonic()

    def count(self) -> None:
        """Show the current state, if the last update is long enough ago."""
        if time.monotonic() - self._drawn >= self.between:
            self.draw()


@contextmanager
def notebook_area() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a text below the running cell; the text is removed at the end."""
    # A notebook has it, and other programs do not need it.
    from IPython.display import DisplayHandle

    handle = DisplayHandle()
    handle.display({"text/plain": ""}, raw=True)
    try:
        yield lambda text: handle.update({"text/plain": text}, raw=True)
    finally:
        handle.update({"text/plain": ""}, raw=True)
