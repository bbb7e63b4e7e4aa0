"""SnapKV: "LLM Knows What You are Looking for Before Generation" (Li et al., NeurIPS 2024, arXiv 2404.14469).

The last w queries of the prompt, the observation window, vote for the entries before it,

    s_j = sum_{i in window} A_h[i, j],

votes are pooled along the sequence so that neighbours of a hit stay too, and each KV head keeps its highest entries,
chosen by the mean vote of the query heads that read it.

official: the released code chooses after it has repeated keys and values for every query head, so that the cache of a
model with grouped heads grows by the size of a group.

Differs: the window of the released code is the last w tokens of the prompt of any kind; if fewer words stand after the
picture, here the window is these words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from espalier.methods.checks import require
from espalier.methods.compressor import CacheCompressor, CacheView
from espalier.methods.select.attention import by_kv_head, paid

POOLINGS = ("mean", "max")


@dataclass(frozen=True)
class SnapKV(CacheCompressor):
    """Keeps the entries that the last words of the prompt attend to most.

    Attributes:
        window: number of queries that vote; all words after the picture if there are fewer.
        kernel: slots that are pooled around each, an odd number; 1 pools nothing.
        pooling: their mean (slots beyond the ends count as zero) or their largest.
        repeated: the released code's copies, one for each query head.
    """

    window: int = 32
    kernel: int = 5
    pooling: Literal["mean", "max"] = "mean"
    repeated: bool = False

    by_head = True  # each KV head keeps what its own queries attend to

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        super().__post_init__()
        require(self.window >= 1, "window", self.window, "1 or more")
        require(self.kernel >= 1 and self.kernel % 2 == 1, "kernel", self.kernel, "odd, 1 or more")
        require(self.pooling in POOLINGS, "pooling", self.pooling, ", ".join(POOLINGS))

    @property
    def repeats_heads(self) -> bool:
        """Whether heads are repeated, as in the released code."""
        return self.repeated

    @property
    def exempt(self) -> tuple[int, int]:
        """Return the observation window."""
        return (0, self.window)

    def score(self, view: CacheView) -> Tensor:
        """Return (H_kv, N), or (H, N) for repeated heads. Cost: O(H w L D)."""
        window = view.words[-self.window :]
        votes = paid(view.queries, view.keys, view.scaling, window)
        if not self.repeated:
            votes = by_kv_head(votes, view.keys.shape[0])
        pool, beyond = (avg_pool1d, 0.0) if self.pooling == "mean" else (max_pool1d, -torch.inf)
        # Only entries before the window are pooled, as in the released code.
        inside = torch.arange(votes.shape[1], device=votes.device) >= window[:1]
        before = votes.masked_fill(inside, beyond).unsqueeze(1)
        pooled = pool(before, self.kernel, stride=1, padding=self.kernel // 2).squeeze(1)
        return pooled[:, view.candidates]
