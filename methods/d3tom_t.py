"""D3ToM-t: D3ToM with a share that changes from step to step (AAAI 2026, arXiv 2511.12280, eq. 11).

Early steps decide what the answer is about and need more of the image than late ones. Over the T - 1 steps that merge,
u = 0 .. T - 2,

    r_u = r_min + (r_max - r_min) u / (T - 2),    r_min = max(0, 2 r - 1),    r_max = min(1, 2 r),

so that the mean is exactly r. These points reproduce the paper's Table 2; where r_u is 1 one token stays, because the
others have to merge into something. Table 6 uses the same shares from high to low.

Differs: the released code counts in the opposite direction, t = 1 .. T - 1: r_t = r_min + (1 - r_min) (1 - t / T), with
a mean other than r; T and t are those of a block, and a later block begins at t = 0, where r is 1 (the code fails
there; here one token stays). With a cached prompt it does not know the step, and the share stays r.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from espalier.methods.checks import require, require_choices
from espalier.methods.d3tom import D3ToM

Direction = Literal["low_to_high", "high_to_low", "released"]


@dataclass(frozen=True)
class D3ToMT(D3ToM):
    """Merges few tokens in early steps and many in late ones.

    Attributes:
        direction: of the share from the first step to the last; `released`: as the released code has it.
    """

    direction: Direction = "low_to_high"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        super().__post_init__()
        require_choices(self, direction=Direction)
        require(
            self.every == 1 or self.direction == "released",
            "every",
            self.every,
            "1 (each step has a share of its own, but with direction=released)",
        )

    def ratios(self, ratio: float, steps: int) -> tuple[float, ...]:
        """Return the share removed at each step, 0 at the first; all 0 if `ratio` is 0."""
        low, high = max(0.0, 2 * ratio - 1), min(1.0, 2 * ratio)
        if ratio and self.direction == "released":
            return (0.0, *(low + (1 - low) * (1 - t / steps) for t in range(1, steps)))
        if steps <= 2:
            return super().ratios(ratio, steps)
        rates = [low + (high - low) * u / (steps - 2) for u in range(steps - 1)]
        if self.direction == "high_to_low":
            rates.reverse()
        return (0.0, *rates)

    def block_ratios(self, ratio: float, steps: int, blocks: int) -> tuple[float, ...]:
        """Return the share removed at each step: the released code starts again with every block, from a share of 1."""
        if self.direction != "released" or blocks == 1 or ratio == 0:
            return self.ratios(ratio, steps)
        first = self.ratios(ratio, steps // blocks)
        return first + (blocks - 1) * (1.0, *first[1:])

    def cached_ratios(self, ratio: float, steps: int) -> tuple[float, ...]:
        """Return the share removed at each step: as `ratios`, but always the same in the released code."""
        if self.direction == "released":
            return super().ratios(ratio, steps)
        return self.ratios(ratio, steps)
