"""The most similar candidates of each token: the k most similar as a mask, or the likest one of a changing set."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.methods.checks import require_finite
from espalier.methods.select.cosines import Cosines
from espalier.methods.select.topk import rows_of

#: Likest tokens of each that are kept at hand, and rows that are sorted at a time.
AT_HAND, BLOCK = 32, 256


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


class Nearest:
    """The likest tokens of each of (B, N) tokens, to look up the likest one of a set that changes.

    Cost: O(N^2), and that of all rows of the cosines; memory of a few of them for each token.
    """

    def __init__(self, cosines: Cosines) -> None:
        """Sort out the likest of each token."""
        self._cosines = cosines
        diagonal = cosines.diagonal()
        tokens = torch.arange(diagonal.shape[1], device=diagonal.device).expand_as(diagonal)
        n_near = min(AT_HAND, diagonal.shape[1])
        blocks = [cosines.rows(block).topk(n_near, dim=2) for block in tokens.split(BLOCK, dim=1)]
        self._value, self._index = (torch.cat(side, dim=1) for side in zip(*blocks, strict=True))

    def among(self, members: Tensor, tokens: Tensor, exists: Tensor) -> Tensor:
        """Return (B, K) the largest cosine of each token (B, K) with one of the `members` (B, N); -2 if there is none.

        Where `exists` (B, K) is false the value may be lower. Waits for the device once.
        """
        rows = rows_of(tokens)
        near = members[rows.unsqueeze(2), self._index[rows, tokens]]
        place = near.to(torch.uint8).argmax(dim=2)
        likeness = self._value[rows, tokens, place]
        # Of tokens with no member at hand the whole row is searched.
        missing = exists & ~near.gather(2, place.unsqueeze(2)).squeeze(2)
        n_missing = int(missing.sum(dim=1).max())
        if n_missing:
            columns = (~missing).to(torch.uint8).argsort(dim=1, stable=True)[:, :n_missing]
            whole_rows = self._cosines.rows(tokens.gather(1, columns))
            highest = whole_rows.masked_fill_(~members.unsqueeze(1), -2).amax(dim=2)
            likeness.scatter_(1, columns, highest)
        return likeness
