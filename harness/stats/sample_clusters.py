"""Samples that belong together, as one value for each unit of statistics."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from espalier.harness.stats.interval import Array


def by_unit(values: Array, units: Sequence[Hashable]) -> Array:
    """Return one value for each unit, so that the mean stays and units are independent; order of first appearance.

    Where every sample is a unit of its own, the values come back as they are. A unit's value is the mean of all plus
    what its members deviate from it, times units over samples: the linear form of a ratio whose units differ in size.
    """
    place = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
    if len(place) == len(values):
        return values
    mean = values.mean()
    sums = np.bincount([place[unit] for unit in units], weights=values - mean)
    found: Array = mean + sums * (len(place) / len(values))
    return found
