"""The board of a sweep: what it counts, that it fits the terminal, and the time that it states."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from espalier.harness.runs.progress_bar import FAILURES, SCORES, Board, BoardCell, Forecast

METHODS = [f"method_{number}" for number in range(20)]
RATIOS = [0.1, 0.25, 0.5, 0.75, 0.9]


def row(value: float | None, status: str = "done") -> dict[str, Any]:
    extra = {"headline": "acc", "resumed_samples": 4}
    metrics = {"other": {"value": 9.0}, "acc": {"value": value}}
    return {"metrics": metrics, "extra": extra, "status": status, "n_samples": 10}


def board(*benchmarks: str) -> tuple[Board, list[BoardCell]]:
    places = [
        BoardCell(name, method, ratio)
        for name in benchmarks
        for method in METHODS
        for ratio in RATIOS
    ]
    made = Board()
    made.forecast.expect(len(places), {})
    made.expect(places)
    return made, places


def drawn(shown: Board, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(shown)
    return console.export_text().splitlines()


def test_cells_are_counted_once_and_samples_by_who_answered_them() -> None:
    shown, places = board("rec")
    shown.forecast.pending = {"key": "rec"}
    shown.begin(places[0])
    shown.finish(places[0], row(0.5, "cached"))
    shown.begin(places[1])
    shown.finish(places[1], row(0.75))
    shown.forecast.computed("key", 2.0)
    shown.begin(places[2])
    shown.fail(places[2], "broken")
    shown.begin(places[3])
    shown.running_samples = 3
    # Six of the second cell's ten were answered before; three of this one, in 1 s.
    assert shown.counts(seconds_left=69, elapsed=1.0) == (
        "cells: 2 done (1 of them stored before), 1 running, 1 failed, 96 left; 3 samples/s; 1:09 left"
    )
    shown.finish(places[3], row(None))
    assert shown.scores[places[3]] == "undefined"


@pytest.mark.parametrize("width", [40, 80, 140])
def test_the_running_cell_is_among_the_scores_and_nothing_is_wider_than_the_screen(
    width: int,
) -> None:
    shown, places = board("caption", "rec")
    for number, place in enumerate(places[:-1]):
        shown.begin(place)
        lines = drawn(shown, width)
        assert max(map(len, lines)) <= width
        heading, *scores = [line for line in lines if not line.startswith("failed")]
        assert heading.startswith(place.benchmark)
        assert 1 < len(scores) <= SCORES
        (running,) = (line for line in scores if "…" in line.replace(place.method, ""))
        assert running.startswith(place.method)
        if number % 7:
            shown.finish(place, row(number / 1000))
        else:
            shown.fail(place, "ValueError: " + "a long story " * 20)
    if width == 80:
        shown.begin(places[-1])
        *_, more = drawn(shown, width)
        assert more == f"failed before: {len(shown.failed) - FAILURES} more"
        assert sum(line.startswith("failed: ") for line in drawn(shown, width)) == FAILURES
        assert f"{(len(places) - 3) / 1000:.3f}" in "\n".join(drawn(shown, width))


# ------------------------------------------------------------------ the time left


def forecast() -> Forecast:
    sweep = Forecast()
    sweep.expect(5, {"a": "rec", "b": "rec", "c": "caption", "d": "rec"})
    return sweep


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
        sweep.computed(finished, seconds)
    assert sweep.left(key, elapsed, share) == (left and pytest.approx(left))


def test_stored_cells_take_no_time() -> None:
    sweep = Forecast(3, pending={"a": "rec"})
    assert sweep.left("a", elapsed=1.0, share=0.5) == pytest.approx(1.0)
