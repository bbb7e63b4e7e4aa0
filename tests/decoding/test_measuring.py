"""Timing of both sides: every drafted token costs its forward, whatever is drafted, and medians of pairs count."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from espalier.harness.decoding.speculative.decoding_record import DecodingTrace, Round
from espalier.harness.decoding.speculative.drafts import Draft
from espalier.harness.decoding.speculative.forward_times import (
    DRAFTED,
    MIN_ROUNDS,
    TIMED_ROUNDS,
    WARMUP_ROUNDS,
    ForwardTimes,
    WindowChoice,
    best_window_of,
    measure_forwards,
)
from espalier.harness.decoding.speculative.state_machine import DrafterLost, Lap, TimedRound

#: A quarter of the rounds is fast, a quarter slow.
SPEEDS = (1.0, 2.0, 2.0, 8.0)


class Echo:
    """Says the last token again and remembers what it has run, as a model's side does."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.forwards: list[int] = []

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        drafted = [tokens[-1]] * count
        missing = 0 if self.ran[: len(tokens)] == list(tokens) else 1
        self.ran = [*tokens, *drafted[:-1]]
        self.forwards.append(missing + count - 1)
        return Draft(tuple(drafted))


class Target:
    def rows(self, tokens: Sequence[int], draft: Draft) -> list[int]:
        assert not draft.tokens
        return [0]


class Clock:
    """Each round takes what the machine is fast at then; the two sides' times have one ratio."""

    def __init__(self, ratio: float = 3.0) -> None:
        self.ratio, self.played, self.number = ratio, list[str](), 0

    def _round(self, how: str, draft: Draft) -> TimedRound:
        self.played.append(how)
        self.number += 1
        slow = 100.0 if self.number <= WARMUP_ROUNDS else SPEEDS[self.number % len(SPEEDS)]
        drafting, verifying = slow * DRAFTED, slow * self.ratio
        return TimedRound(draft, [0], slow, Lap(drafting, drafting), Lap(verifying, verifying))

    def in_turn(self, draft: Callable[[], Draft], rows: Callable[[Draft], list[int]]) -> TimedRound:
        proposed = draft()
        rows(proposed)
        return self._round("in turn", proposed)

    def at_once(self, draft: Callable[[], Draft], rows: Callable[[], list[int]]) -> TimedRound:
        proposed = draft()
        rows()
        return self._round("at once", proposed)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_drafter_that_guesses_the_answer_is_not_measured_too_fast(overlap: bool) -> None:
    drafter, clock = Echo(), Clock()
    measure_forwards(drafter, Target(), clock, overlap, 0, (7, 6))
    assert set(drafter.forwards) == {DRAFTED}
    assert clock.played == ["at once" if overlap else "in turn"] * (WARMUP_ROUNDS + TIMED_ROUNDS)


def test_a_machine_that_changes_its_speed_changes_both_sides() -> None:
    seconds = measure_forwards(Echo(), Target(), Clock(2.5), True, 0, (7, 6))
    assert seconds.ratio == pytest.approx(2.5)
    assert (
        seconds.draft == 2.0
    )  # the middle one: neither the fastest nor the mean, and not the slow beginning
    assert seconds.target == 5.0


def test_a_tree_is_timed_by_the_level() -> None:
    seconds = measure_forwards(Echo(), Target(), Clock(), False, 2, (7, 6))
    assert seconds.ratio == pytest.approx(3.0 * 2 / DRAFTED)


def test_a_drafter_that_is_lost_is_not_timed() -> None:
    class Lost(Echo):
        def draft(self, tokens: Sequence[int], count: int) -> Draft:
            raise DrafterLost("gone")

    with pytest.raises(DrafterLost):
        measure_forwards(Lost(), Target(), Clock(), True, 0, (7, 6))


def test_the_best_window_is_that_of_the_rounds_so_far() -> None:
    """Every second of the judged tokens stands; a target step takes as long as 2.6 drafted tokens, three in a round."""
    good = Round(2, 3, 3, 3, False, 7.8, 7.8, 6.76)
    bad = Round(0, 3, 3, 0, True, 7.8, 7.8, 6.76)
    assert best_window_of(DecodingTrace(rounds=[good, bad] * (MIN_ROUNDS // 2 - 1))) is None
    assert best_window_of(DecodingTrace(rounds=[good, bad] * MIN_ROUNDS)) == 2
    assert best_window_of(DecodingTrace(rounds=[good] * MIN_ROUNDS)) == 3
    assert best_window_of(DecodingTrace(rounds=[Round(0, 0, 0, 0, True)] * 2 * MIN_ROUNDS)) is None


@pytest.mark.parametrize(
    ("ratio", "window"), [(0.2, 1), (1.49, 1), (1.5, 2), (2.4, 2), (2.5, 3), (2.6, 3), (13.4, 13)]
)
def test_auto_is_the_nearest_number_of_draft_forwards_in_one_of_the_target(
    ratio: float, window: int
) -> None:
    choice = WindowChoice("auto")
    assert choice.gamma == 1
    choice.timings.append(ForwardTimes(ratio, 1.0))
    assert choice.gamma == window
