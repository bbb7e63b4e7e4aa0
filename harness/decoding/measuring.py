"""How long one forward of either side takes, before the first answers: what `gamma=auto` is made of."""

from __future__ import annotations

from statistics import median

from harness.decoding.drafts import NOTHING
from harness.decoding.machine import Drafter, Timed, Transport
from harness.decoding.sides import Side
from harness.decoding.telling import Steps

#: Rounds that count, after as many that do not, and the tokens drafted in each.
TIMED, WARMING, AHEAD = 32, 16, 4

#: Answers that are measured before; the middle one counts, for machines change their speed from second to second.
TIMES = 3

#: Room that the answer of all rounds takes in a cache.
ROOM = TIMED + WARMING + AHEAD


def steps_of(
    drafter: Drafter, target: Side, transport: Transport, overlap: bool, levels: int, token: int
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
        token: what the answer consists of.

    Raises:
        DrafterLost: the drafter died, or does not answer.
    """

    def together(length: int) -> Timed:
        tokens = [token] * length
        if overlap:
            return transport.at_once(
                lambda: drafter.draft(tokens, AHEAD), lambda: target.rows(tokens, NOTHING)
            )
        return transport.in_turn(
            lambda: drafter.draft(tokens, AHEAD), lambda _: target.rows(tokens, NOTHING)
        )

    rounds = [together(length) for length in range(1, WARMING + TIMED + 1)][WARMING:]
    return Steps(
        target=median(one.target_seconds for one in rounds),
        draft=median(one.draft_seconds for one in rounds) / (levels or AHEAD),
    )
