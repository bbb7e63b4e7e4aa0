"""LOOK-M: "Look-Once Optimization in KV Cache for Multimodal Long-Context" (Wan et al., EMNLP 2024, arXiv 2406.18139).

Text before pictures: words are never evicted, and of the visual entries those stay that received the most attention,

    s_j = sum_i A_h[i, j]   over all queries i of the prompt,

each KV head by itself. Every evicted entry i then merges into the entry that stays, word or visual, with the key most
similar, c(i) = argmax_c cos(k_i, k_c), keys and values alike. With E(c) the n entries that go to c:

    pivot     k_c <- (k_c + sum_{i in E(c)} (k_c + k_i) / 2) / (n + 1)       the paper's best
    average   k_c <- (k_c + sum_{i in E(c)} k_i) / (n + 1)
    weighted  k_c <- (k_c + sum_{i in E(c)} cos(k_i, k_c) k_i) / (n + 1)
    none      evicted entries are dropped

Keys are compared and merged as they are cached, rotary positions applied, and a value goes where its key goes.

Differs: the released code (github.com/SUSTechBruce/LOOK-M, commit ecf0f51, `TextPivotMerge_LayerWise`) is followed for
`pivot`. Its budget covers words and pictures, and words take what they need first; here it is that of visual entries.
It also keeps the last tenth of the prompt. Its averaged and weighted merging are for the entries with a similarity,
mean over heads, above the overall mean; the averaged one then pairs their targets with the first entries that go.
Neither is followed, and their formulas above were not compared with the paper's text. Heads that share keys are
averaged (there, none do). EffiVLM-Bench finds that merging pictures into words hurts: `targets=visual` merges into
visual entries alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from espalier.methods.checks import require, require_choices
from espalier.methods.compressor import CacheCompressor, CacheView
from espalier.methods.h2o import H2O
from espalier.methods.select.similarity import unit
from espalier.methods.select.topk import indices_of

Merging = Literal["pivot", "average", "weighted", "none"]
Targets = Literal["prompt", "visual"]


@dataclass(frozen=True)
class LookM(CacheCompressor):
    """Keeps what received the most attention, and merges what goes into the entries with the most similar keys.

    Attributes:
        merging: how.
        targets: into which entries: all that stay, or the visual ones among them.
        recent: last slots that never go where all of the prompt may.
    """

    merging: Merging = "pivot"
    targets: Targets = "prompt"
    recent: int = 32

    by_head = True  # each KV head keeps what its own queries attend to

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        super().__post_init__()
        require(self.recent >= 1, "recent", self.recent, "1 or more")
        require_choices(self, merging=Merging, targets=Targets)

    @property
    def exempt(self) -> tuple[int, int]:
        """Return the recent window."""
        return (0, self.recent)

    def score(self, view: CacheView) -> Tensor:
        """Return (H_kv, N). Cost: O(H L^2 D) time in blocks of rows."""
        return H2O().score(view)

    def fold(
        self, keys: Tensor, values: Tensor, stays: Tensor, visual: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return keys and values (H, L, D) with evicted entries merged. Cost: O(H E S D) for E that go into S."""
        if self.merging == "none":
            return None
        is_target = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device)
        leaves = is_target.scatter(1, stays, False)
        leaving = indices_of(leaves, keys.shape[1] - stays.shape[1])
        if self.targets == "visual":
            is_target = torch.zeros_like(leaves).index_fill_(1, visual, True)
        heads = zip(keys, values, leaving, stays, is_target.gather(1, stays), strict=True)
        folded = [self._fold_head(*head) for head in heads]
        return torch.stack([key for key, _ in folded]), torch.stack([value for _, value in folded])

    def _fold_head(
        self, keys: Tensor, values: Tensor, leaving: Tensor, onto: Tensor, is_target: Tensor
    ) -> tuple[Tensor, Tensor]:
        if not len(leaving) or not len(onto):
            return keys, values
        units = unit(keys.unsqueeze(0))[0]
        likeness = units[leaving] @ units[onto].T
        best = likeness.masked_fill_(~is_target, -torch.inf).max(dim=1)
        place = onto[best.indices]
        share = best.values.unsqueeze(1)
        if self.merging != "weighted":
            share = torch.full_like(share, 0.5 if self.merging == "pivot" else 1.0)
        count = torch.ones_like(keys[:, :1], dtype=units.dtype)
        count.index_add_(0, place, torch.ones_like(count[leaving]))
        merged = []
        for entries in (keys, values):
            wide = entries.to(torch.promote_types(entries.dtype, torch.float32))
            total = wide.index_add(0, place, (wide[leaving] * share).to(wide.dtype))
            if self.merging == "pivot":
                total = total + wide * (count - 1).to(wide.dtype) / 2
            total = torch.where(is_target.any(), total / count.to(wide.dtype), wide)
            merged.append(total.to(entries.dtype))
        return merged[0], merged[1]
