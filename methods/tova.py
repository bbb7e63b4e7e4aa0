"""TOVA: "Transformers are Multi-State RNNs" (Oren et al., EMNLP 2024, arXiv 2401.06104).

Token Omission Via Attention: an entry is worth the attention that the last token of the prompt pays to it,

    s_j = 1/H sum_h A_h[last, j],

the highest stay, and all heads of a layer keep the same entries.

Differs: followed is NVIDIA's kvpress (github.com/NVIDIA/kvpress, commit 8bb29b9c, `TOVAPress`); the paper's text was
not compared. The paper drops the lowest entry at every step once a cache is full; kvpress and this file once, after the
prompt. As there the last token's own entry always stays, which the paper leaves to its attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from espalier.methods.compressor import CacheCompressor, CacheView
from espalier.methods.select.attention import paid


@dataclass(frozen=True)
class TOVA(CacheCompressor):
    """Keeps the entries that the last token of the prompt attends to, one choice for all heads."""

    def score(self, view: CacheView) -> Tensor:
        """Return (1, N). Cost: O(H L D)."""
        attention = paid(view.queries, view.keys, view.scaling, view.words[-1:])
        return attention.mean(dim=0, keepdim=True)[:, view.candidates]
