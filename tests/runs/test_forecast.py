"""How long a sweep still takes, by what was computed."""

from __future__ import annotations

import pytest

from espalier.harness.runs.progress_bar import Forecast


def forecast() -> Forecast:
    sweep = Forecast()
    sweep.expect(5, {"a": "rec", "b": "rec", "c": "caption", "d": "rec"})
    return sweep


def test_nothing_is_said_before_anything_is_known() -> None:
    assert forecast().left("a", elapsed=3.0, share=0.0) is None


def test_the_first_cell_is_judged_by_its_own_samples() -> None:
    # A quarter took 10 s: 30 s are left of it, and 40 s of each of the three others.
    assert forecast().left("a", elapsed=10.0, share=0.25) == pytest.approx(30 + 3 * 40)


def test_others_are_judged_by_their_kind_and_else_by_all() -> None:
    sweep = forecast()
    sweep.computed("a", 20.0)
    # b runs for 5 s and has finished nothing: 15 s left; d 20 s; c, of another kind, as long as the mean of all.
    assert sweep.left("b", elapsed=5.0, share=0.0) == pytest.approx(15 + 20 + 20)
    sweep.computed("c", 60.0)
    assert sweep.left("b", elapsed=5.0, share=0.5) == pytest.approx(5 + 20)


def test_a_cell_that_takes_longer_than_thought_is_not_counted_backwards() -> None:
    sweep = forecast()
    sweep.computed("a", 20.0)
    assert sweep.left("b", elapsed=50.0, share=0.0) == pytest.approx(0 + 20 + 20)


def test_stored_cells_take_no_time() -> None:
    sweep = Forecast()
    sweep.expect(3, {"a": "rec"})
    assert sweep.left("a", elapsed=1.0, share=0.5) == pytest.approx(1.0)
