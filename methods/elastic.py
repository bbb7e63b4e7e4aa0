"""Elastic Cache: "Efficient Inference of Vision Instruction-Following Models" (Liu et al., ECCV 2024).

arXiv 2407.18121. An entry is worth the attention that all queries of the prompt pay it, mean over heads; all heads of
a layer keep the same entries. Those that go are merged: each is averaged, keys and values, into the kept entry nearest
to it in the sequence. AirCache (arXiv 2503.23956, Table 11) finds that merging hurts and leaves it out: `merged=0`.

official: the released code takes the values of an argsort for ranks, so that what it keeps is not the top: entry j goes
if the index of the j-th smallest score is among the first f. And it counts entries that go from behind the protected
first slot, but reads them from slot 0 on: in place of entry j the one before it, which may be one that stays, is
averaged into the kept entry nearest to j - 1. Not followed: one entry more goes than the ratio asks for, positions go
on from the length that is left, and while it decodes one entry at a fixed place goes for each new token or so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.methods.checks import require
from espalier.methods.compressor import CacheCompressor, CacheView
from espalier.methods.select.attention import paid
from espalier.methods.select.buckets import into_nearest


@dataclass(frozen=True)
class Elastic(CacheCompressor):
    """Keeps the entries that received the most attention, one choice for all heads.

    Attributes:
        merged: share of the entries that go which are averaged into the nearest that stays, the highest scores first;
            the rest is dropped.
        argsort_as_rank: the released code's mistake in what stays.
        shifted_merge: its mistake in what is merged: the entry before each that goes, into the one nearest to that.
    """

    merged: float = 1.0
    argsort_as_rank: bool = False
    shifted_merge: bool = False

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        super().__post_init__()
        require(0 <= self.merged <= 1, "merged", self.merged, "0 to 1")

    @property
    def exempt(self) -> tuple[int, int]:
        """The first slot and the last."""
        return (1, 1)

    @property
    def merge_shift(self) -> int:
        """As released: by the protected first slot."""
        return 1 if self.shifted_merge else 0

    def score(self, view: CacheView) -> Tensor:
        """Return (1, N). Cost: O(H L^2 D) time in blocks of rows, no map is held."""
        every = torch.arange(view.queries.shape[1], device=view.queries.device)
        scores = paid(view.queries, view.keys, view.scaling, every).mean(dim=0)[view.candidates]
        if self.argsort_as_rank:
            scores = scores.argsort(stable=True).to(scores.dtype)
        return scores.unsqueeze(0)

    def merge(self, scores: Tensor, kept: Tensor) -> Tensor | None:
        """Return (1, N): the nearest kept candidate of the best of those that go."""
        return into_nearest(scores, kept, self.merged, self.merge_shift)
