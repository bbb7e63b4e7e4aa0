"""Clustered samples, reduced to one value per unit of statistics."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from espalier.harness.stats.interval import Array


def by_unit(values: Array, units: Sequence[Hashable]) -> Array:
    """Return one value per unit, with the same mean and independent units, in order of first appearance.

    If every sample is its own unit, the values are returned unchanged. A unit's value is the overall mean plus the sum
    of its members' deviations from it, times units over samples: the linearisation of a ratio over units of different
    size.
    """
    place = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
    if len(place) == len(values):
        return values
    mean = values.mean()
    sums = np.bincount([place[unit] for unit in units], weights=values - mean)
    unit_values: Array = mean + sums * (len(place) / len(values))
    return unit_values
