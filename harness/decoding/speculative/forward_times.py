"""Times of one forward of either side, before and during the first answers, from which the window is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from espalier.harness.decoding.speculative.cached_model import CachedModel
from espalier.harness.decoding.speculative.decoding_record import (
    DecodingRecord,
    DecodingTrace,
    ForwardTimes,
)
from espalier.harness.decoding.speculative.drafts import EMPTY_DRAFT, Draft, Row
from espalier.harness.decoding.speculative.speculative_summary import best_window, steady_rounds
from espalier.harness.decoding.speculative.state_machine import Drafter, TimedRound, Transport
from espalier.methods.base import Window

#: Number of timed rounds, of warm-up rounds before them, and of tokens drafted in each.
TIMED_ROUNDS, WARMUP_ROUNDS, DRAFTED = 32, 16, 4

#: Number of answers with a measurement; the median counts, since machines change their speed from second to second.
MEASUREMENTS = 3

#: Room in a cache for the answer of all rounds.
ROOM = TIMED_ROUNDS + WARMUP_ROUNDS + DRAFTED

#: Minimum number of rounds to choose the best window from.
MIN_ROUNDS = 32


class WindowChoice:
    """The window of each answer, from the measurements before the first answers and the rounds since.

    Args:
        asked: a number of tokens, `auto` (c = T_p / T_q rounded to the nearest, which gives the windows of
            ParallelVLM's five pairs) or `best` (the maximum of the renewal formula for the rounds so far; like `auto`
            while these are few).
    """

    def __init__(self, setting: Window) -> None:
        self._setting = setting
        #: Measurements so far.
        self.timings: list[ForwardTimes] = []
        #: Rounds so far, without answers in which the draft was lost.
        self.played = DecodingTrace()

    @property
    def measured(self) -> bool:
        """Whether enough measurements were taken."""
        return len(self.timings) >= MEASUREMENTS

    @property
    def gamma(self) -> int:
        """Tokens drafted in a round of the next answer."""
        steps = self.steps
        if isinstance(self._setting, int):
            return self._setting
        if self._setting == "best" and (best := best_window_of(self.played)) is not None:
            return best
        return 1 if steps is None else max(1, int(steps.ratio + 0.5))

    @property
    def steps(self) -> ForwardTimes | None:
        """The median of the measurements so far; None without any."""
        if not self.timings:
            return None
        return sorted(self.timings, key=lambda times: times.ratio)[len(self.timings) // 2]

    def note(self, record: DecodingRecord) -> None:
        """Add the rounds of an answer unless the draft was lost."""
        if record.degraded is None:
            self.played.rounds += steady_rounds([record]).rounds


def best_window_of(played: DecodingTrace) -> int | None:
    """Return the best window by the times and the acceptance of these rounds; None if they are few."""
    rounds = [step for step in played.rounds if step.drafted]
    acceptance = played.acceptance
    if len(rounds) < MIN_ROUNDS or acceptance is None:
        return None
    draft = sum(step.draft_seconds for step in rounds) / sum(step.drafted for step in rounds)
    return best_window(acceptance, fmean(step.target_seconds for step in rounds), draft)


def measure_forwards(
    drafter: Drafter,
    target: CachedModel,
    transport: Transport,
    overlap: bool,
    levels: int,
    tokens: tuple[int, int],
) -> ForwardTimes:
    """Return the median seconds of one forward of either side, after an answer that grows by one token per round.

    The sides are timed in pairs, so that changes of the machine's speed affect both, and in parallel if they will work
    in parallel.

    Args:
        drafter: has run the prompt.
        target: has run the prompt, too.
        transport: that of the run.
        overlap: whether both sides will work in parallel.
        levels: forwards per draft: the levels of a tree, 0 for a chain.
        tokens: two different tokens from which the answer is made.

    Raises:
        DrafterLost: the drafter died, or does not answer.
    """
    token, other_token = tokens

    answer = [token]

    def draft() -> Draft:
        return drafter.draft(answer, DRAFTED)

    def rows(*_: Draft) -> Sequence[Row]:
        return target.rows(answer, EMPTY_DRAFT)

    rounds: list[TimedRound] = []
    while len(rounds) < WARMUP_ROUNDS + TIMED_ROUNDS:
        rounds.append(transport.at_once(draft, rows) if overlap else transport.in_turn(draft, rows))
        # Never the drafted token: a drafter that has already run its next token has one forward less to do.
        answer.append(token if rounds[-1].draft.tokens[0] != token else other_token)
    return ForwardTimes(
        target=median(timed.verifying.wall for timed in rounds[WARMUP_ROUNDS:]),
        draft=median(timed.drafting.wall for timed in rounds[WARMUP_ROUNDS:]) / (levels or DRAFTED),
    )
