"""Transport within one thread: draft and verify one after the other, by the wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from espalier.harness.decoding.speculative.acceptance import Row
from espalier.harness.decoding.speculative.drafts import EMPTY_DRAFT, Draft
from espalier.harness.decoding.speculative.meter import Meter
from espalier.harness.decoding.speculative.state_machine import TimedRound


def verify_only(rows: Callable[[], Sequence[Row]], target: Meter) -> TimedRound:
    """Verify without drafting, by the wall clock."""
    target_rows, verifying = target.run(rows)
    return TimedRound(EMPTY_DRAFT, target_rows, verifying.wall, verifying=verifying)


@dataclass(frozen=True)
class SequentialTransport:
    """Both sides in this thread, one after the other, by the wall clock.

    Attributes:
        target: meter of the target.
        draft: meter of the drafter.
    """

    target: Meter = field(default_factory=Meter)
    draft: Meter = field(default_factory=Meter)

    def in_turn(
        self, draft: Callable[[], Draft], rows: Callable[[Draft], Sequence[Row]]
    ) -> TimedRound:
        """Draft, then verify."""
        start = time.perf_counter()
        proposed, drafting = self.draft.run(draft)
        target_rows, verifying = self.target.run(lambda: rows(proposed))
        return TimedRound(proposed, target_rows, time.perf_counter() - start, drafting, verifying)

    def at_once(self, draft: Callable[[], Draft], rows: Callable[[], Sequence[Row]]) -> TimedRound:
        """Draft, then verify the earlier tokens: the same answer as in parallel, without the gain."""
        return self.in_turn(draft, lambda _: rows())

    def verify_only(self, rows: Callable[[], Sequence[Row]]) -> TimedRound:
        """Verify."""
        return verify_only(rows, self.target)
