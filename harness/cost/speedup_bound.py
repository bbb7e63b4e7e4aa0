"""The speed-up that the arithmetic allows, beside the one that was measured.

A phase that spends a share s of the full FLOPs can be at most 1/s times as fast, as long as both run at the same rate.
A measured speed-up whose whole interval lies above the bound means that the timer leaves something out, that the
unreduced side does work which the count does not know, or that the two do not run at the same rate.
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
    """How many times as fast as the unreduced model a phase was; factors, larger is faster.

    Attributes:
        ratio: the unreduced model's time over the method's, geometric mean over the pairs.
        low: lower end of the 95 % interval, Student's on the logarithms of the pairs; None with a single one.
        high: upper end.
        bound: what the FLOPs of the same phase of the same samples allow; None where none are counted.
    """

    ratio: float
    low: float | None
    high: float | None
    bound: float | None = None

    @classmethod
    def of_pairs(
        cls, plain: Sequence[float], own: Sequence[float], bound: float | None = None
    ) -> Gain:
        """Return the gain out of the times of both sides, pair by pair."""
        found = ratio_interval(plain, own)
        if math.isnan(found.low):
            return cls(found.value, None, None, bound)
        return cls(found.value, found.low, found.high, bound)

    @property
    def above_bound(self) -> bool:
        """Whether the whole interval lies above the bound: then the timing must be explained, not believed."""
        return self.bound is not None and self.low is not None and self.low > self.bound

    def entry(self) -> dict[str, Any]:
        """Return the form that a row holds."""
        ends = {"ratio": self.ratio, "low": self.low, "high": self.high}
        if self.bound is None:
            return ends
        return {**ends, "bound": self.bound, "above_bound": self.above_bound}


def prefill_bound(samples: Sequence[SampleFlops]) -> float:
    """Return full over spent FLOPs of the decoder layers, all that the prefill phase times.

    The output head stands outside: it runs after the phase, once for each prompt on both sides.
    """
    full = sum(sample.exact_full.text for sample in samples)
    return full / sum(sample.exact.text for sample in samples)


def first_token_bound(samples: Sequence[SampleFlops]) -> float:
    """Return the same with tower and projector on both sides."""
    full = sum(sample.exact_full.total - sample.exact_full.head for sample in samples)
    return full / sum(sample.exact.total - sample.exact.head for sample in samples)


def ceiling(tower: float, language: float) -> float:
    """Return the speed-up at which a method after the tower ends when it keeps no token at all.

    Args:
        tower: FLOPs that no such method can save (tower and projector).
        language: FLOPs of the language model's visual tokens.
    """
    return (tower + language) / tower
