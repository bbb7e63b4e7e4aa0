"""Steps that the slow versions of several methods have in common, over lists."""

from __future__ import annotations

import math
from collections.abc import Sequence

from espalier.methods.base import View

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


def two_stages(view: View, row: int, keep: int, layers: Sequence[int], mass: float) -> list[int]:
    """Return what SpecVLM keeps of a row, in order: token by token, with the sums of its paper."""
    here = {key: value[row].double() for key, value in view.signals.items()}
    last = here["visual_positions"].max()
    words = [t for t, place in enumerate(here["text_positions"]) if place > last]
    n_tokens = view.tokens.shape[1]
    scores = [
        sum(float(here[f"text_attention@{layer}"][t, j]) for layer in layers for t in words)
        / (len(words) * len(layers))
        for j in range(n_tokens)
    ]
    chosen: list[int] = []
    covered = 0.0
    for j in sorted(range(n_tokens), key=lambda j: (-scores[j], j)):
        if covered >= mass * sum(scores) or len(chosen) == keep:
            break
        chosen.append(j)
        covered += scores[j]
    rest = [j for j in range(n_tokens) if j not in chosen]
    missing = keep - len(chosen)
    for q in range(missing):
        chosen.append(rest[0 if missing == 1 else q * (len(rest) - 1) // (missing - 1)])
    return sorted(chosen)
