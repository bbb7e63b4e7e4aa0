"""Elastic Cache: "Efficient Inference of Vision Instruction-Following Models" (Liu et al., ECCV 2024).

arXiv 2407.18121. An entry is worth the attention that all queries of the prompt pay it, mean over heads; all heads of
a layer keep the same entries. Those that go are merged: each is averaged, keys and values, into the kept entry nearest
to it in the sequence. AirCache (arXiv 2503.23956, Table 11) finds that merging hurts and leaves it out: `merged=0`.

official: the released code takes the values of an argsort for ranks, so that what it keeps is not the top: entry j goes
if the index of the j-th smallest score is among the first f.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from methods.checks import require
from methods.compressor import CacheCompressor, CacheView
from methods.select.attention import paid


@dataclass(frozen=True)
class Elastic(CacheCompressor):
    """Keeps the entries that received the most attention, one choice for all heads.

    Attributes:
        merged: share of the entries that go which are averaged into the nearest that stays, the highest scores first;
            the rest is dropped.
        argsort_as_rank: the released code's mistake.
    """

    merged: float = 1.0
    argsort_as_rank: bool = False

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        super().__post_init__()
        require(0 <= self.merged <= 1, "merged", self.merged, "0 to 1")

    @property
    def exempt(self) -> tuple[int, int]:
        """The first slot and the last."""
        return (1, 1)

    def score(self, view: CacheView) -> Tensor:
        """Return (1, N). Cost: O(H L^2 D) time in blocks of rows, no map is held."""
        every = torch.arange(view.queries.shape[1], device=view.queries.device)
        found = paid(view.queries, view.keys, view.scaling, every).mean(dim=0)[view.candidates]
        if self.argsort_as_rank:
            found = found.argsort(stable=True).to(found.dtype)
        return found.unsqueeze(0)

    def merge(self, scores: Tensor, kept: Tensor) -> Tensor | None:
        """Return (1, N): the nearest kept candidate of the best of those that go, the earlier one of two as near."""
        n = scores.shape[-1]
        gone = n - kept.shape[-1]
        n_merged = round(self.merged * gone)
        if n_merged == 0:
            return None
        places = torch.arange(n, device=scores.device)
        behind = torch.searchsorted(kept[0], places).clamp(max=kept.shape[-1] - 1)
        right, left = kept[0][behind], kept[0][(behind - 1).clamp(min=0)]
        nearest = torch.where((places - left).abs() <= (places - right).abs(), left, right)
        stays = torch.zeros(n, dtype=torch.bool, device=scores.device).index_fill_(0, kept[0], True)
        best = scores[0].masked_fill(stays, float("-inf")).argsort(descending=True, stable=True)
        found = torch.full_like(places, -1)
        found[best[:n_merged]] = nearest[best[:n_merged]]
        return torch.where(stays, places, found).unsqueeze(0)
