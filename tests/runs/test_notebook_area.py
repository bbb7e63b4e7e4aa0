"""Progress in a notebook: text that is replaced."""

from __future__ import annotations

from rich.text import Text

from espalier.harness.runs.progress_bar import CellProgress, NotebookArea
from espalier.harness.runs.sweep_board import Board


def test_lines_are_drawn_as_text() -> None:
    texts: list[str] = []
    area = NotebookArea(Text("three\nlines\nof it"), texts.append)
    area.draw()
    assert texts == ["three\nlines\nof it\n"]


def test_samples_are_counted_at_most_once_in_a_while() -> None:
    texts: list[str] = []
    lines = CellProgress(None, "title", Board(), "key")
    area = NotebookArea(Text("x"), texts.append, between=1e9)
    lines.attach(area.draw, area.count)
    area.count()
    area.count()
    assert len(texts) == 1
    area.draw()
    assert len(texts) == 2
    every = NotebookArea(Text("x"), texts.append, between=0)
    every.count()
    every.count()
    assert len(texts) == 4
