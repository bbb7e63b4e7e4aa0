"""An estimate with its interval, and checks of its data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

#: Number of values drawn at once, 40 MB of float64.
BLOCK = 5_000_000


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; `low` and `high` are NaN for a single sample."""

    value: float
    low: float
    high: float

    @property
    def percent(self) -> str:
        """A share as text: "56.1 [52.0, 60.3]"."""
        return f"{100 * self.value:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}]"

    @property
    def points(self) -> str:
        """A difference of shares as text, with signs: "+1.9 [-0.3, +4.1]"."""
        return f"{100 * self.value:+.1f} [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"

    @property
    def decimals(self) -> str:
        """A number as text: "0.56 [0.52, 0.60]"."""
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def named(self, name: str) -> dict[str, float]:
        """Return the three numbers as columns of a table: `<name>`, `<name>_low` and `<name>_high`."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def checked(values: ArrayLike) -> Array:
    """Return scores as an array; raises ValueError if there are none or some are not finite."""
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or not len(scores):
        raise ValueError(f"scores must be a non-empty list of numbers, got shape {scores.shape}")
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite")
    return scores


def paired(ours: ArrayLike, theirs: ArrayLike) -> tuple[Array, Array]:
    """Return two lists of scores of the same samples; raises ValueError as `checked`, or if they differ in length."""
    first, second = checked(ours), checked(theirs)
    if len(first) != len(second):
        raise ValueError(f"paired scores differ in length: {len(first)} and {len(second)}")
    return first, second


def is_binary(*scores: Array) -> bool:
    """Return whether every score is 0 or 1."""
    return all(bool(np.isin(values, (0.0, 1.0)).all()) for values in scores)
