"""Counter-based random numbers: every draw is a pure function of (seed, split, index, counter).

NumPy's ``Generator`` streams may change between versions, so scenes use a splitmix64 hash in uint64
arithmetic, which gives the same numbers on every platform and NumPy version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np

Item = TypeVar("Item")
SPLITS = {"train": 1, "val": 2, "test": 3}

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_INDEX_STRIDE = np.uint64(0xD1342543DE82EF95)


def mix64(values: Any) -> Any:
    """Apply the splitmix64 finaliser to a uint64 or an array of them, wrapping on overflow."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def draws(seed: int, split: str, index: np.ndarray | Sequence[int], count: int) -> np.ndarray:
    """Return ``(len(index), count)`` uint64 draws; row i depends on (seed, split, index[i]) only.

    Args:
        seed: Non-negative seed of the stream.
        split: "train", "val" or "test".
        index: Scene indices ``(B,)``.
        count: Draws per scene.

    Returns:
        Uniform 64-bit integers ``(B, count)``.
    """
    with np.errstate(over="ignore"):
        base = mix64(np.uint64(seed) * _GOLDEN + np.uint64(SPLITS[split]))
        keys = mix64(base + np.asarray(index, np.uint64) * _INDEX_STRIDE)
        counters = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        return cast("np.ndarray", mix64(keys[:, None] + counters[None]))


def uniform(values: np.ndarray, bound: np.ndarray | int) -> np.ndarray:
    """Map uint64 draws to integers in ``[0, bound)`` by multiply-shift (no modulo bias, no floats)."""
    high = values >> np.uint64(32)
    return ((high * np.asarray(bound, np.uint64)) >> np.uint64(32)).astype(np.int64)


class DrawStream:
    """One row of draws, read in order as Python integers."""

    def __init__(self, row: np.ndarray) -> None:
        """Wrap one row ``(count,)`` of :func:`draws`."""
        self._values = row.tolist()
        self._next = 0

    def below(self, bound: int) -> int:
        """Return the next integer in ``[0, bound)``."""
        value: int = self._values[self._next]
        self._next += 1
        return ((value >> 32) * bound) >> 32

    def pick(self, items: Sequence[Item]) -> Item:
        """Return one item of a non-empty sequence."""
        return items[self.below(len(items))]
