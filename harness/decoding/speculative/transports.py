"""Transports that need one process: by the wall clock one after the other, and by a virtual clock for planning."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from espalier.harness.decoding.speculative.acceptance import Row
from espalier.harness.decoding.speculative.drafts import NOTHING, Draft
from espalier.harness.decoding.speculative.meter import Meter
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
