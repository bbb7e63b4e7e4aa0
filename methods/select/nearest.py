"""The most similar candidates of each token: the k most similar as a mask, or the likest one of a changing set."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from espalier.methods.checks import read, require_finite
from espalier.methods.select.cosines import Cosines
from espalier.methods.select.topk import rows_of

#: Likest tokens of each in a first and in a second list.
LISTED = (8, 56)
#: Rows that are sorted at a time.
BLOCK = 256
#: A likeness below all cosines.
NONE = -2.0


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

    Cost: O(N^2) for the lists of many tokens, and that of all rows of the cosines; few tokens have no lists.

    Attributes:
        many: number of tokens from which on lists cost less than the rows of all members at each look-up.
    """

    many: ClassVar[int] = 1024

    def __init__(self, cosines: Cosines) -> None:
        """List the likest tokens of each token."""
        self._cosines = cosines
        diagonal = cosines.diagonal()
        self._nothing = torch.zeros_like(diagonal, dtype=torch.bool)
        tokens = torch.arange(diagonal.shape[1], device=diagonal.device).expand_as(diagonal)
        has_lists = tokens.shape[1] >= max(self.many, sum(LISTED))
        blocks = [
            cosines.rows(block).topk(sum(LISTED), dim=2)
            for block in tokens.split(BLOCK, dim=1)
            if has_lists
        ]
        sides = [torch.cat(side, dim=1).split(LISTED, dim=2) for side in zip(*blocks, strict=True)]
        self._tables = [(v.contiguous(), i.contiguous()) for v, i in zip(*sides, strict=True)]

    def among(self, partners: Tensor, tokens: Tensor) -> Tensor:
        """Return (B, K) the largest cosine of each token (B, K) with one of `partners` (B, P), P > 0.

        At most two device synchronisations, none without lists.
        """
        if not self._tables:
            return self._cosines.rows(partners).amax(dim=1).gather(1, tokens)
        members = self._nothing.scatter(1, partners, True)
        likeness = self._at_hand(self._tables[0], members, tokens)
        for table in (*self._tables[1:], None):
            missing = likeness == NONE
            n_missing = int(read(missing.sum(dim=1).max())[0])
            if n_missing == 0:
                break
            columns = (~missing).to(torch.uint8).argsort(dim=1, stable=True)[:, :n_missing]
            points = tokens.gather(1, columns)
            highest = (
                self._at_hand(table, members, points) if table else self._of_all(members, points)
            )
            likeness.scatter_(1, columns, highest.maximum(likeness.gather(1, columns)))
        return likeness

    def _at_hand(self, table: tuple[Tensor, Tensor], members: Tensor, tokens: Tensor) -> Tensor:
        """Look up (B, K) in a table of likest tokens: their cosines and indices."""
        value, index = (side[rows_of(tokens), tokens] for side in table)
        near = members.gather(1, index.flatten(1)).view_as(index)
        return value.masked_fill_(~near, NONE).amax(dim=2)

    def _of_all(self, members: Tensor, tokens: Tensor) -> Tensor:
        """Search (B, K) whole rows."""
        rows = self._cosines.rows(tokens)
        return rows.masked_fill_(~members.unsqueeze(1), NONE).amax(dim=2)
