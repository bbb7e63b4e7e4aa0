"""KeyDiff (Park et al., 2025, arXiv 2504.15364): eviction of cache entries by the similarity of their keys.

An entry is worth the more the less its key k_j, rotary positions applied, is like the others of its KV head:

    s_j = -cos(k_j, mean_i k_i / |k_i|)   over all entries i of the prompt,

and the highest stay, for each KV head by itself. No query is read.

Differs: followed is NVIDIA's kvpress (github.com/NVIDIA/kvpress, commit 8bb29b9c, `KeyDiffPress`); the paper's text was
not compared. kvpress evicts once, as here, while the paper does block by block as the prompt is read (`BlockPress`
there). Under `scope=visual` words count in the mean and stay. kvpress leaves the question out of what it compresses;
here it counts in the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from espalier.methods.compressor import CacheCompressor, CacheView


@dataclass(frozen=True)
class KeyDiff(CacheCompressor):
    """Keeps the entries with keys unlike the mean key of their head."""

    by_head = True  # each KV head compares its own keys

    def score(self, view: CacheView) -> Tensor:
        """Return (H_kv, N). Cost: O(H_kv L D)."""
        keys = view.keys.to(torch.promote_types(view.keys.dtype, torch.float32))
        anchor = normalize(keys, dim=2).mean(dim=1, keepdim=True)
        return -cosine_similarity(keys[:, view.candidates], anchor, dim=2)
