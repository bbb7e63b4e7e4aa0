"""Groups of tokens side by side: each group a row of its own, padded to the largest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from espalier.methods.checks import read
from espalier.methods.select.topk import indices_of, rows_of


@dataclass(frozen=True)
class Groups:
    """A partition of N tokens into at most G groups of at most M tokens.

    Attributes:
        index: (B, G, M) tokens of each group in sequence order; N where a group has fewer.
        size: (B, G) tokens of each group, 0 for an absent one.
        n_tokens: N.
    """

    index: Tensor
    size: Tensor
    n_tokens: int

    @classmethod
    def of(cls, number: Tensor) -> Groups:
        """Read the groups off a number for each token (B, N): equal integers of 0 or more are one group.

        Groups come by ascending number. Cost: O(N log N); waits for the device once.
        """
        n_tokens = number.shape[1]
        key, order = number.long().sort(dim=1, stable=True)
        run = pad((key[:, 1:] != key[:, :-1]).long().cumsum(dim=1), (1, 0))
        size = torch.zeros_like(run).scatter_add(1, run, torch.ones_like(run))
        n_groups, largest = map(int, read(run.max() + 1, size.max()))
        start = (size.cumsum(dim=1) - size).gather(1, run)
        place = torch.arange(n_tokens, device=number.device) - start
        table = order.new_full((len(order), n_groups * largest), n_tokens)
        table.scatter_(1, run * largest + place, order)
        return cls(table.view(-1, n_groups, largest), size[:, :n_groups], n_tokens)

    @property
    def valid(self) -> Tensor:
        """(B, G, M) which entries of `index` are tokens."""
        return self.index < self.n_tokens

    def rows(self, values: Tensor) -> Tensor:
        """Return (B G, M) or (B G, M, D) values of the tokens from (B, N) or (B, N, D), 0 where a group has fewer.

        If all tokens are one group, `values` itself.
        """
        batch, n_groups, largest = self.index.shape
        if n_groups == 1:
            return values
        index = self.index.flatten(1)
        taken = values[rows_of(index), index.clamp(max=self.n_tokens - 1)]
        taken[index == self.n_tokens] = 0
        return taken.view(batch * n_groups, largest, *values.shape[2:])

    def tokens(self, values: Tensor) -> Tensor:
        """Return (B, N) values of the tokens from (B G, M), without the entries that are no tokens."""
        table = values.new_zeros(len(self.index), self.n_tokens + 1)
        table.scatter_(1, self.index.flatten(1), values.view(len(self.index), -1))
        return table[:, : self.n_tokens]

    def kept(self, chosen: Tensor, n_keep: int) -> Tensor:
        """Return (B, n_keep) ascending tokens from booleans (B G, M), true for `n_keep` tokens of each row."""
        return indices_of(self.tokens(chosen), n_keep)
