"""The speed-up that the FLOPs allow, for comparison with the measured one.

A phase that spends a share s of the full FLOPs can be at most 1/s times as fast, if both run at the same rate. If the
whole interval of a measured speed-up lies above the bound, the timer leaves something out, the unreduced side does work
that is not counted, or the two do not run at the same rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from espalier.harness.cost.flops import SampleFlops
from espalier.harness.stats import ratio_interval


@dataclass(frozen=True)
class Gain:
    """Speed-up of a phase over the unreduced model; factors, larger is faster.

    Attributes:
        ratio: the unreduced model's time over the method's, geometric mean over the pairs.
        low: lower end of the 95 % interval, Student's on the logarithms of the pairs; None with a single pair.
        high: upper end.
        bound: limit by the FLOPs of the same phase of the same samples; None if these are not counted.
    """

    ratio: float
    low: float | None
    high: float | None
    bound: float | None = None

    @classmethod
    def of_pairs(
        cls, plain: Sequence[float], reduced: Sequence[float], bound: float | None = None
    ) -> Gain:
        """Return the gain from the times of both sides, pair by pair."""
        interval = ratio_interval(plain, reduced)
        if math.isnan(interval.low):
            return cls(interval.value, None, None, bound)
        return cls(interval.value, interval.low, interval.high, bound)

    @property
    def above_bound(self) -> bool:
        """Whether the whole interval lies above the bound, so that the timing needs an explanation."""
        return self.bound is not None and self.low is not None and self.low > self.bound

    def entry(self) -> dict[str, Any]:
        """Return the form stored in a row."""
        ends = {"ratio": self.ratio, "low": self.low, "high": self.high}
        if self.bound is None:
            return ends
        return {**ends, "bound": self.bound, "above_bound": self.above_bound}


def prefill_bound(samples: Sequence[SampleFlops]) -> float:
    """Return full over spent FLOPs of the decoder layers, all that the prefill phase times.

    The output head is not included: it runs after the phase, once for each prompt on both sides.
    """
    full = sum(sample.exact_full.text for sample in samples)
    return full / sum(sample.exact.text for sample in samples)


def first_token_bound(samples: Sequence[SampleFlops]) -> float:
    """Return the same with tower and projector on both sides."""
    full = sum(sample.exact_full.total - sample.exact_full.head for sample in samples)
    return full / sum(sample.exact.total - sample.exact.head for sample in samples)
