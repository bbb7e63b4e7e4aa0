"""The two stages of SpecVLM written out, for a model that prunes itself and for the decoder it was made for."""

from __future__ import annotations

from collections.abc import Sequence

from espalier.methods.base import View


def two_stages(view: View, row: int, keep: int, layers: Sequence[int], mass: float) -> list[int]:
    """Token by token, with the sums of the paper; returns what one row keeps, in order."""
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
