"""Transports that need one process: by the wall clock one after the other, and by a virtual clock for planning."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from espalier.harness.decoding.speculative.acceptance import Row
from espalier.harness.decoding.speculative.drafts import NOTHING, Draft
from espalier.harness.decoding.speculative.meter import Lap, Meter
from espalier.harness.decoding.speculative.state_machine import Timed


def alone(rows: Callable[[], Sequence[Row]], target: Meter) -> Timed:
    """Verify without drafting, by the wall clock."""
    found, verifying = target.run(rows)
    return Timed(NOTHING, found, verifying.wall, verifying=verifying)


@dataclass(frozen=True)
class Sequential:
    """Both sides in this thread, one after the other, by the wall clock.

    Attributes:
        target: times the target, where it works.
        draft: times the drafter.
    """

    target: Meter = field(default_factory=Meter)
    draft: Meter = field(default_factory=Meter)

    def in_turn(self, draft: Callable[[], Draft], rows: Callable[[Draft], Sequence[Row]]) -> Timed:
        """Draft, then verify."""
        start = time.perf_counter()
        proposed, drafting = self.draft.run(draft)
        found, verifying = self.target.run(lambda: rows(proposed))
        return Timed(proposed, found, time.perf_counter() - start, drafting, verifying)

    def at_once(self, draft: Callable[[], Draft], rows: Callable[[], Sequence[Row]]) -> Timed:
        """Draft, then verify what was there before: the same answer as at the same time, without the gain."""
        return self.in_turn(draft, lambda _: rows())

    def alone(self, rows: Callable[[], Sequence[Row]]) -> Timed:
        """Verify."""
        return alone(rows, self.target)


@dataclass(frozen=True)
class Virtual:
    """A virtual clock: each step of a side costs what it is said to cost.

    Attributes:
        target: seconds of one forward of the target.
        draft: seconds of one forward of the drafter.
        message: seconds of one exchange between the two.
        depth: forwards that a draft took, by default one for each token (a tree needs one a level).
    """

    target: float
    draft: float
    message: float = 0.0
    depth: Callable[[Draft], int] = lambda draft: len(draft.tokens)

    def in_turn(self, draft: Callable[[], Draft], rows: Callable[[Draft], Sequence[Row]]) -> Timed:
        """Charge one side after the other."""
        proposed = draft()
        drafting = self.draft * self.depth(proposed)
        total = drafting + self.target + self.message
        return Timed(proposed, rows(proposed), total, _lap(drafting), _lap(self.target))

    def at_once(self, draft: Callable[[], Draft], rows: Callable[[], Sequence[Row]]) -> Timed:
        """Charge the longer side."""
        proposed = draft()
        drafting = self.draft * self.depth(proposed)
        total = max(drafting, self.target) + self.message
        return Timed(proposed, rows(), total, _lap(drafting), _lap(self.target))

    def alone(self, rows: Callable[[], Sequence[Row]]) -> Timed:
        """Charge the target."""
        return Timed(NOTHING, rows(), self.target, verifying=_lap(self.target))


def _lap(seconds: float) -> Lap:
    return Lap(seconds, seconds)
