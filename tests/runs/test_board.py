"""The board of a sweep: what it counts, and the time that it states; the time column of progress lines."""

from __future__ import annotations

from typing import Any

import pytest
from rich.progress import Progress

from espalier.harness.runs.progress_bar import Board, TimeLeft


def row(status: str = "done", key: str = "key") -> dict[str, Any]:
    return {"run_key": key, "extra": {"resumed_samples": 4}, "status": status, "n_samples": 10}


def test_cells_are_counted_once_and_samples_by_who_answered_them() -> None:
    shown = Board(100, {"key": "rec"})
    shown.finish(row("cached", "other"), 0.0)
    shown.finish(row(), 2.0)
    shown.fail("broken")
    shown.running_samples = 3
    # Six of the second cell's ten were answered before; three of this one, in 1 s.
    assert shown.counts(seconds_left=69, elapsed=1.0) == (
        "cells: 2 done (1 of them stored before), 1 running, 1 failed, 96 left; 3 samples/s; 1:09 left"
    )


def forecast() -> Board:
    return Board(5, {"a": "rec", "b": "rec", "c": "caption", "d": "rec"})


#: Seconds of finished runs, then the running cell with its seconds and its share, and the seconds left.
CASES = {
    "nothing is known": ({}, "a", 3.0, 0.0, None),
    # A quarter took 10 s: 30 s are left of it, and 40 s of each of the three others.
    "its own samples": ({}, "a", 10.0, 0.25, 30 + 3 * 40),
    # b runs for 5 s and has finished nothing: 15 s left; d 20 s; c, of another kind, as long as the mean of all.
    "those of its kind, else of all": ({"a": 20.0}, "b", 5.0, 0.0, 15 + 20 + 20),
    "all kinds": ({"a": 20.0, "c": 60.0}, "b", 5.0, 0.5, 5 + 20),
    "longer than estimated": ({"a": 20.0}, "b", 50.0, 0.0, 0 + 20 + 20),
}


@pytest.mark.parametrize("name", CASES)
def test_the_time_left_follows_from_finished_runs(name: str) -> None:
    sweep, (spent, key, elapsed, share, left) = forecast(), CASES[name]
    for finished, seconds in spent.items():
        sweep.finish(row(key=finished), seconds)
    assert sweep.left(key, elapsed, share) == (left and pytest.approx(left))


def test_stored_cells_take_no_time() -> None:
    sweep = Board(3, {"a": "rec"})
    assert sweep.left("a", elapsed=1.0, share=0.5) == pytest.approx(1.0)


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
