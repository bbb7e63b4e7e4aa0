"""How much faster answers came than by plain decoding: totals over totals, with an interval over answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from espalier.harness.decoding.speculative.decoding_record import DecodingRecord, Spent
from espalier.harness.stats import Interval, rate_ratio_interval


@dataclass(frozen=True)
class SpeedUp:
    """A speed-up over plain decoding of the same answers.

    Attributes:
        ratio: seconds a token of all plain answers together over those of all own, so that every token weighs the same,
            with its 95 % bootstrap interval over answers.
        mean: over answers, each weighing the same, of their own ratios.
    """

    ratio: Interval
    mean: float

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The interval; None for a single answer."""
        low, high = self.ratio.low, self.ratio.high
        return None if math.isnan(low) else (low, high)


def decoding(spent: Spent) -> tuple[float, int]:
    """Return the seconds behind the prefill, and the tokens behind the first, which the prefill brings."""
    return spent.decode, spent.tokens - 1


def whole(spent: Spent) -> tuple[float, int]:
    """Return all seconds and all tokens."""
    return spent.total, spent.tokens


def speedup(
    records: Sequence[DecodingRecord], part: Callable[[Spent], tuple[float, int]]
) -> SpeedUp | None:
    """Return how much faster answers came, of those compared; None if there are none, or no token to count.

    Args:
        records: the answers.
        part: the seconds and the tokens of an answer that count; answers without such tokens do not.
    """
    found = [(*part(one.plain), *part(one.spent)) for one in records if one.plain is not None]
    counted = [one for one in found if min(one) > 0]
    if not counted:
        return None
    mean = fmean((slow / many) / (quick / own) for slow, many, quick, own in counted)
    return SpeedUp(rate_ratio_interval(counted), mean)
