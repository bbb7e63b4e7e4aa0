"""One step's choice: the word that each masked place would say, and the places unveiled (low-confidence remasking)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def candidates(
    logits: Tensor, silent: Sequence[int], temperature: float, generators: Sequence[torch.Generator]
) -> tuple[Tensor, Tensor]:
    """Return the word of each place (B, G) and its probability among those that may be said, in double precision.

    At a temperature above 0 the word is drawn by the Gumbel-max rule, argmax (logits / temperature + noise); its
    confidence is its probability at temperature 1 all the same.

    Args:
        logits: (B, G, V).
        silent: ids that are never said.
        temperature: 0 takes the likeliest, the lower id of equals.
        generators: one CPU generator for each row.
    """
    never = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    never[list(silent)] = True
    scores = logits.double().masked_fill(never, float("-inf"))
    chosen = scores
    if temperature > 0:
        drawn = [torch.rand(scores.shape[1:], generator=g, dtype=torch.double) for g in generators]
        uniform = torch.stack(drawn).clamp(min=torch.finfo(torch.double).tiny).to(scores.device)
        chosen = scores / temperature - (-uniform.log()).log()
    words = chosen.argmax(-1)
    return words, scores.softmax(-1).gather(-1, words.unsqueeze(-1)).squeeze(-1)


def unveiled(confidence: Tensor, masked: Tensor, count: int) -> Tensor:
    """Return (B, G) booleans: the `count` most confident of the places that are `masked`, the first of equals.

    Args:
        confidence: (B, G), 0 or more.
        masked: (B, G) places that may be unveiled, at least `count` in each row.
        count: 1 or more.
    """
    order = torch.where(masked, confidence, -1.0).argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(masked).scatter(1, order[:, :count], True)
