"""How long one forward of either side takes, before the first answers and in them: what the window is made of."""

from __future__ import annotations

from statistics import fmean, median

from espalier.harness.decoding.speculative import renewal
from espalier.harness.decoding.speculative.cached_model import CachedModel
from espalier.harness.decoding.speculative.decoding_record import DecodingRecord, Steps
from espalier.harness.decoding.speculative.drafts import NOTHING
from espalier.harness.decoding.speculative.speculative_summary import steady_rounds
from espalier.harness.decoding.speculative.state_machine import Drafter, Timed, Transport
from espalier.harness.decoding.speculative.trace import Trace
from espalier.methods.base import Window

#: Rounds that count, after as many that do not, and the tokens drafted in each.
TIMED, WARMING, AHEAD = 32, 16, 4

#: Answers that are measured before; the middle one counts, for machines change their speed from second to second.
TIMES = 3

#: Room that the answer of all rounds takes in a cache.
ROOM = TIMED + WARMING + AHEAD

#: Rounds from which on they say which window is best.
ENOUGH = 32


class WindowChoice:
    """The window of each answer, by what was measured before the first ones and played since.

    Args:
        asked: a number of tokens, `auto` (c = T_p / T_q rounded to the nearest, which gives the windows of
            ParallelVLM's five pairs) or `best` (what the renewal formula promises most for, by the rounds so far; as
            long as these are few, as auto).
    """

    def __init__(self, asked: Window) -> None:
        self._asked = asked
        #: Measurements so far.
        self.timings: list[Steps] = []
        #: Rounds so far, those left out that a lost draft took no part in.
        self.played = Trace()

    @property
    def measured(self) -> bool:
        """Whether no further measurement is wanted."""
        return len(self.timings) >= TIMES

    @property
    def gamma(self) -> int:
        """Tokens drafted in a round of the next answer."""
        steps = self.steps
        if isinstance(self._asked, int):
            return self._asked
        if self._asked == "best" and (found := best_of(self.played)) is not None:
            return found
        return 1 if steps is None else max(1, int(steps.ratio + 0.5))

    @property
    def steps(self) -> Steps | None:
        """The middle one of the measurements so far; None without any."""
        if not self.timings:
            return None
        return sorted(self.timings, key=lambda one: one.ratio)[len(self.timings) // 2]

    def note(self, telling: DecodingRecord) -> None:
        """Take the rounds of an answer that both sides gave."""
        if telling.degraded is None:
            self.played.rounds += steady_rounds([telling]).rounds


def best_of(played: Trace) -> int | None:
    """Return the window that promises most by the times and the acceptance of these rounds; None if they are few."""
    rounds = [one for one in played.rounds if one.drafted]
    acceptance = played.acceptance
    if len(rounds) < ENOUGH or acceptance is None:
        return None
    draft = sum(one.draft_seconds for one in rounds) / sum(one.drafted for one in rounds)
    return renewal.best_window(acceptance, fmean(one.target_seconds for one in rounds), draft)


def steps_of(
    drafter: Drafter,
    target: CachedModel,
    transport: Transport,
    overlap: bool,
    levels: int,
    tokens: tuple[int, int],
) -> Steps:
    """Return the median seconds of one forward of either side, behind an answer that grows by one token each time.

    The sides are timed in pairs, so that a machine that changes its speed changes both, and at the same time where they
    will work at the same time.

    Args:
        drafter: has run the prompt.
        target: has too.
        transport: that of the run.
        overlap: whether both sides will work at once.
        levels: forwards in what the drafter says at once: those of a tree, 0 for a chain.
        tokens: two different ones, of which the answer consists.

    Raises:
        DrafterLost: the drafter died, or does not answer.
    """
    token, other = tokens

    def together(tokens: list[int]) -> Timed:
        if overlap:
            return transport.at_once(
                lambda: drafter.draft(tokens, AHEAD), lambda: target.rows(tokens, NOTHING)
            )
        return transport.in_turn(
            lambda: drafter.draft(tokens, AHEAD), lambda _: target.rows(tokens, NOTHING)
        )

    answer = [token]
    rounds: list[Timed] = []
    while len(rounds) < WARMING + TIMED:
        rounds.append(together(answer))
        # Never what was drafted: a drafter that has run its next token already has one forward less to do.
        answer.append(token if rounds[-1].draft.tokens[0] != token else other)
    return Steps(
        target=median(one.verifying.wall for one in rounds[WARMING:]),
        draft=median(one.drafting.wall for one in rounds[WARMING:]) / (levels or AHEAD),
    )
