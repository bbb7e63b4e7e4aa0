"""D3ToM-t: D3ToM with a share that changes from step to step (AAAI 2026, arXiv 2511.12280, eq. 11).

Early steps settle what the answer is about and need more of the image than late ones. Over the T - 1 steps that merge,
u = 0 .. T - 2,

    r_u = r_min + (r_max - r_min) u / (T - 2),    r_min = max(0, 2 r - 1),    r_max = min(1, 2 r),

so that the mean is r exactly. These are the points with which the paper's Table 2 comes out; where r_u is 1 one token
stays, for a sequence has to merge into something. Table 6 has the same shares from high to low. The released code
counts the other way about from what the paper says, t = 1 .. T - 1: r_t = r_min + (1 - r_min) (1 - t / T), whose mean
is not r. Where the prompt is cached it is told of no step, and the share stays r.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from espalier.methods.checks import require
from espalier.methods.d3tom import D3ToM

Direction = Literal["low_to_high", "high_to_low", "released"]


@dataclass(frozen=True)
class D3ToMT(D3ToM):
    """Merges little at the beginning and much at the end.

    Attributes:
        direction: of the share from the first step to the last; `released`: as the released code has it.
    """

    direction: Direction = "low_to_high"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        super().__post_init__()
        valid = get_args(Direction)
        require(self.direction in valid, "direction", self.direction, ", ".join(valid))

    def ratios(self, ratio: float, steps: int) -> tuple[float, ...]:
        """Return the share removed at each step, none at the first; nothing ever if `ratio` is 0."""
        low, high = max(0.0, 2 * ratio - 1), min(1.0, 2 * ratio)
        if ratio == 0 or steps <= 2:
            return super().ratios(ratio, steps)
        if self.direction == "released":
            rates = [low + (1 - low) * (1 - t / steps) for t in range(1, steps)]
        else:
            rates = [low + (high - low) * u / (steps - 2) for u in range(steps - 1)]
        if self.direction == "high_to_low":
            rates.reverse()
        return (0.0, *rates)

    def cached_ratios(self, ratio: float, steps: int) -> tuple[float, ...]:
        """Return the share removed at each step: as `ratios`, but always the same in the released code."""
        if self.direction == "released":
            return super().ratios(ratio, steps)
        return self.ratios(ratio, steps)
