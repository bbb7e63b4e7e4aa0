"""The time column of progress lines."""

from __future__ import annotations

from rich.progress import Progress

from espalier.harness.runs.progress_bar import TimeLeft


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
