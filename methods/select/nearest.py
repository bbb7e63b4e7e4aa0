"""The k most similar candidates of each token, as a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.methods.checks import require_finite


def nearest(similarity: Tensor, token_indices: Tensor, k: int) -> Tensor:
    """Return (B, M, N) booleans: the k of N candidates most similar to each of M tokens, without itself.

    Equal similarities go to the lower index: `torch.topk` does not define that, so only its k-th value is used. If k is
    N - 1 or more, all others are marked.

    Args:
        similarity: (B, M, N) finite numbers.
        token_indices: (B, M) index of each token among the candidates.
        k: how many.

    Raises:
        MethodError: a similarity is NaN or infinite.

    Cost: O(M N log k), no Python loop.
    """
    itself = torch.zeros_like(similarity, dtype=torch.bool).scatter_(
        2, token_indices.unsqueeze(2), True
    )
    k = min(k, similarity.shape[2] - 1)
    if k == 0:
        return torch.zeros_like(itself)
    candidates = require_finite(similarity, "similarities").masked_fill(itself, -torch.inf)
    last = candidates.topk(k, dim=2).values[:, :, -1:]
    above, level = candidates > last, candidates == last
    room = k - above.sum(dim=2, keepdim=True)
    return above | (level & (level.cumsum(dim=2) <= room))
