"""VL-Cache: "Sparsity and Modality-Aware KV Cache Compression" (Tu et al., ICLR 2025, arXiv 2410.23317).

The queries after the picture decide. Let A^l be their attention in layer l, T rows over the prompt. An entry counts
where it reaches a hundredth of its row's largest one, and a layer that looks at few entries gets a small budget:

    density_l = mean over heads of #{(i, j): A_ij >= p max_k A_ik} / #{(i, j): j <= i},    p = 0.01
    beta_l = clip(density_l / sum_m density_m * alpha L, 0.01, 1)

of L layers, alpha = 1 - ratio. Entries with the highest

    s_j = sum_i A_ij

stay, each KV head by itself (per_head) or all alike. Scores are scaled here so that they sum to a layer's density,
which changes no choice inside a layer and makes `allocation=strength` this rule. What clipping leaves over or takes
goes to the other layers, so that the sum is exact.

Differs: no code of the authors was found, and the equations were not compared with the paper's text. Followed is
EffiVLM-Bench (github.com/EffiVLM-Bench/EffiVLM-Bench, commit ab3ee18, `VlCacheKVCluster`). It also reserves a tenth of
the budget for the last entries of the prompt, which are words and always stay here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.methods.checks import require
from espalier.methods.compressor import Allocation, CacheCompressor, CacheView
from espalier.methods.select.attention import by_kv_head, rows
from espalier.methods.select.budgets import RULES, entries

#: Least share of its entries that a layer keeps.
LEAST = 0.01


@dataclass(frozen=True)
class VLCache(CacheCompressor):
    """Keeps the entries that the question attends to most, and more of them in layers that attend to many.

    Attributes:
        p: part of a row's largest attention from which an entry counts.
        per_head: whether each KV head chooses by itself.
    """

    allocation: Allocation = "strength"
    p: float = 0.01
    per_head: bool = True

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        super().__post_init__()
        require(0 <= self.p <= 1, "p", self.p, "0 to 1")

    @property
    def by_head(self) -> bool:
        """Return `per_head`."""
        return self.per_head

    def score(self, view: CacheView) -> Tensor:
        """Return (H_kv, N), or (1, N) for one choice of all heads. Cost: O(H T L D) for T words after the picture."""
        heads, length = view.queries.shape[:2]
        votes = torch.zeros(heads, length, dtype=torch.float64, device=view.keys.device)
        counted = torch.zeros((), dtype=torch.float64, device=view.keys.device)
        for attention in rows(view.queries, view.keys, view.scaling, view.words):
            votes[:, : attention.shape[-1]] += attention.sum(dim=1)
            largest = attention.amax(dim=-1, keepdim=True)
            counted += ((attention >= self.p * largest) & (attention > 0)).sum()
        density = counted / (heads * (view.words + 1).sum())
        chosen = by_kv_head(votes[:, view.candidates], len(view.keys) if self.per_head else 1)
        return chosen * density / chosen.mean(dim=0).sum().clamp(min=torch.finfo(chosen.dtype).tiny)

    def allocate(self, scores: Sequence[Tensor], total: int) -> Tensor:
        """Return (layers,) counts by density, at least a hundredth of each layer's entries."""
        if self.allocation != "strength":
            return super().allocate(scores, total)
        sizes = [layer.shape[-1] for layer in scores]
        keep = total / len(scores)
        lower_bounds = torch.tensor(sizes, dtype=torch.float64) * LEAST / keep
        return entries(RULES["strength"](scores, keep).maximum(lower_bounds), total, sizes)
