"""Progress in a notebook, text that is replaced, and the time column of progress lines."""

from __future__ import annotations

from rich.progress import Progress
from rich.text import Text

from espalier.harness.runs.progress_bar import Board, CellLines, NotebookArea, TimeLeft


def test_lines_are_drawn_as_text() -> None:
    texts: list[str] = []
    NotebookArea(Text("three\nlines\nof it"), texts.append).draw()
    assert texts == ["three\nlines\nof it\n"]


def test_samples_are_counted_at_most_once_in_a_while() -> None:
    texts: list[str] = []
    lines = CellLines(None, "title", Board(), "key")
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


def test_a_line_shows_the_time_left_or_until_that_is_known_the_time_passed() -> None:
    now = [0.0]
    lines = Progress(get_time=lambda: now[0])
    lines.add_task("title", total=10)
    now[0] = 65.0
    texts = [str(TimeLeft().render(lines.tasks[0]))]
    for done in (1, 2):
        now[0] += 10.0
        lines.update(lines.tasks[0].id, completed=done)
    texts.append(str(TimeLeft().render(lines.tasks[0])))
    assert texts == ["1:05", "1:20 left"]
