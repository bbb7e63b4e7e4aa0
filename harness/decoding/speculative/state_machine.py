"""The state machine of speculative decoding: which tokens are verified, which only drafted, and what comes next.

It knows no model. A drafter and a verifier are functions of the answer so far; whatever caches they hold, they cut back
to what is still right. Two ways of playing a round:

    in turn    draft gamma tokens, then one forward of the target judges all of them and adds one of its own
    at once    the drafter goes on behind what is still unverified while the target judges that; then both are
               compared, the first of the new tokens included

At once is PEARL's pre-verify (nothing pending: one token is judged) and post-verify (gamma - 1 pending: gamma are) in
one rule. A refused token takes everything drafted behind it along. Only verified tokens ever leave the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from espalier.harness.decoding.speculative.acceptance import Row, Rule
from espalier.harness.decoding.speculative.drafts import Draft, walk
from espalier.harness.decoding.speculative.meter import NO_TIME, Lap
from espalier.harness.decoding.speculative.trace import Round, Trace


class Drafter(Protocol):
    """Proposes tokens."""

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        """Return what follows the answer so far: a chain of `count` tokens, or a tree as deep."""


class Verifier(Protocol):
    """Knows what the target says."""

    def rows(self, tokens: Sequence[int], draft: Draft) -> Sequence[Row]:
        """Return the target's row behind the verified `tokens`, then behind each token of `draft`, in one forward."""


#: A drafter that reads its chat, or whose draft begins with its prompt, has so many times the patience for a round: a
#: video is decoded, cut and run through the tower before the first token, and that is no sign of trouble.
READING = 20


class DrafterLost(Exception):
    """The drafter died or does not answer; the message says which."""


@dataclass(frozen=True)
class Timed:
    """Results of one round's work and the seconds it took: the whole of it by the wall, and each side's part.

    A side that had nothing to do has no lap.
    """

    draft: Draft
    rows: Sequence[Row]
    seconds: float
    drafting: Lap = NO_TIME
    verifying: Lap = NO_TIME


class Transport(Protocol):
    """Runs both sides, wherever they are.

    Raises:
        DrafterLost: from either call; the target's rows can still be asked for by `alone`.
    """

    def in_turn(self, draft: Callable[[], Draft], rows: Callable[[Draft], Sequence[Row]]) -> Timed:
        """Draft, then verify what was drafted."""

    def at_once(self, draft: Callable[[], Draft], rows: Callable[[], Sequence[Row]]) -> Timed:
        """Draft and verify at the same time."""

    def alone(self, rows: Callable[[], Sequence[Row]]) -> Timed:
        """Verify without drafting."""


@dataclass(frozen=True)
class Machine:
    """One way of decoding.

    Attributes:
        drafter: proposes; None: the target decodes alone, one token a round.
        verifier: judges.
        rule: what makes a drafted token stand.
        transport: runs both and keeps the time.
        gamma: tokens drafted in a round.
        overlap: at once instead of in turn.
        ends: tokens that end an answer.
    """

    drafter: Drafter | None
    verifier: Verifier
    rule: Rule
    transport: Transport
    gamma: int = 1
    overlap: bool = False
    ends: Collection[int] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a window below 1."""
        if self.gamma < 1:
            raise ValueError(f"gamma={self.gamma} is out of range; valid: 1 or more")

    def run(self, limit: int) -> Trace:
        """Decode up to `limit` tokens, or to the first end of sequence.

        Raises:
            ValueError: a limit below 1.
        """
        if limit < 1:
            raise ValueError(f"limit={limit} is out of range; valid: 1 or more")
        trace, pending = Trace(), Draft(())
        verified: list[int] = []
        drafter = self.drafter
        seen = 0
        while len(verified) < limit and not self._ended(verified[seen:]):
            seen = len(verified)
            try:
                pending = self._round(drafter, verified, pending, trace)
            except DrafterLost as lost:
                drafter, pending, trace.degraded = None, Draft(()), str(lost)
        trace.tokens = self._cut(verified, limit)
        return trace

    def _ended(self, tokens: Sequence[int]) -> bool:
        return any(token in self.ends for token in tokens)

    def _cut(self, verified: Sequence[int], limit: int) -> list[int]:
        """Return the answer without what was verified behind its end."""
        for place, token in enumerate(verified[:limit]):
            if token in self.ends:
                return list(verified[: place + 1])
        return list(verified[:limit])

    def _round(
        self, drafter: Drafter | None, verified: list[int], pending: Draft, trace: Trace
    ) -> Draft:
        """Play one round, extend `verified`, and return what is pending after it."""
        verifier, gamma = self.verifier, self.gamma
        if drafter is None:
            done = self.transport.alone(lambda: verifier.rows(verified, pending))
            judged = pending
        elif self.overlap:
            ahead = [*verified, *pending.tokens]
            done = self.transport.at_once(
                lambda: drafter.draft(ahead, gamma), lambda: verifier.rows(verified, pending)
            )
            judged = pending.joined(done.draft.part(0, 1))
        else:
            done = self.transport.in_turn(
                lambda: drafter.draft(verified, gamma),
                lambda draft: verifier.rows(verified, draft),
            )
            judged = done.draft
        verdict = walk(judged, done.rows, self.rule, len(verified))
        verified += [judged.tokens[node] for node in verdict.path]
        if verdict.own is not None:
            verified.append(verdict.own)
        trace.rounds.append(
            Round(
                pending=len(pending.tokens),
                drafted=len(done.draft.tokens),
                checked=len(verdict.path) + verdict.refused,
                accepted=len(verdict.path),
                own=verdict.own is not None,
                seconds=done.seconds,
                draft_seconds=done.drafting.wall,
                target_seconds=done.verifying.wall,
                draft_busy=done.drafting.busy,
                target_busy=done.verifying.busy,
            )
        )
        clean = self.overlap and drafter is not None and verdict.own is None
        return done.draft.part(1) if clean else Draft(())
