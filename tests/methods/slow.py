"""Steps that the slow versions of several methods have in common, over lists."""

from __future__ import annotations

import math
from collections.abc import Sequence

Square = Sequence[Sequence[float]]


def peaks(squared: Square, near: int, count: int) -> list[int]:
    """Return the places of `count` density peaks in order: dense, and far from all that is denser.

    Args:
        squared: squared distances.
        near: how many nearest points, itself included, make the density of one.
        count: how many there are.
    """
    places = range(len(squared))
    density = [math.exp(-sum(sorted(row)[:near]) / max(1, near)) for row in squared]
    farthest = max(map(max, squared), default=0.0)
    score = []
    for i in places:
        denser = [squared[i][j] for j in places if (density[j], -j) > (density[i], -i)]
        score.append(density[i] * math.sqrt(min(denser, default=farthest)))
    return sorted(sorted(places, key=lambda i: (-score[i], i))[:count])


def farthest_first(distances: Square, count: int) -> list[int]:
    """Return the most isolated place, and again and again the one farthest from all that were picked; in order."""
    places = range(len(distances))
    alone = [min((distances[i][j] for j in places if j != i), default=0.0) for i in places]
    picked = [max(places, key=lambda i: (alone[i], -i))]
    while len(picked) < count:
        near = {i: min(distances[i][j] for j in picked) for i in places if i not in picked}
        picked.append(max(near, key=lambda i: (near[i], -i)))
    return sorted(picked)
