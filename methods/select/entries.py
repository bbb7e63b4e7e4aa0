"""Merging inside a cached prompt: keys and values of dropped tokens are added to those of kept ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from espalier.methods.checks import require_finite
from espalier.methods.select.topk import indices_of

Targets = Literal["visual", "prompt"]

#: Added to a vector's norm before it is divided by it.
EPSILON = 1e-8


@dataclass(frozen=True, eq=False)
class Entries:
    """The cache entries of one layer for one sample's prompt, and the visual tokens that stay.

    Attributes:
        keys: (H, S, D) without their rotary positions, in at least fp32.
        values: (H, S, D_v).
        visual: (N,) entries of the visual tokens, ascending.
        kept: (K,) ascending indices among the N of those that stay.
    """

    keys: Tensor
    values: Tensor
    visual: Tensor
    kept: Tensor

    @property
    def leaving(self) -> Tensor:
        """(N - K,) entries that leave, ascending."""
        leaves = torch.ones_like(self.visual, dtype=torch.bool).index_fill(0, self.kept, False)
        return self.visual[indices_of(leaves[None], len(leaves) - len(self.kept))[0]]

    @property
    def staying(self) -> Tensor:
        """(S - N + K,) entries that stay, ascending."""
        leaving, count = self.leaving, self.keys.shape[1]
        alive = leaving.new_ones(count, dtype=torch.bool).index_fill(0, leaving, False)
        return indices_of(alive[None], count - len(leaving))[0]


def merged_entries(entries: Entries, targets: Targets) -> tuple[Tensor, Tensor]:
    """Return keys and values (H, S - N + K, D) of the staying entries, each leaving one merged into the most similar.

    Each leaving entry goes to the target with the highest cosine of keys, mean over heads, the first of equals. Keys
    and values are added, and every target's vector is then scaled, head by head, to the mean former length of targets
    over tokens and heads.

    Args:
        entries: of one layer and sample.
        targets: `visual`: visual tokens that stay; `prompt`: all entries that stay.

    Cost: O(N S D) for the cosines, O(H N D) for the sums.
    """
    staying, leaving = entries.staying, entries.leaving
    onto = staying if targets == "prompt" else entries.visual[entries.kept]
    mean = normalize(entries.keys.mean(0), dim=-1)
    cosine = require_finite(mean[leaving] @ mean[onto].T, "cosine of keys")
    at = onto[cosine.argmax(1)]
    keys, values = (_folded(store, leaving, at, onto) for store in (entries.keys, entries.values))
    return keys[:, staying], values[:, staying]


def _folded(store: Tensor, leaving: Tensor, at: Tensor, onto: Tensor) -> Tensor:
    """Return (H, S, D) with entries `leaving` added to those `at`, and all of `onto` scaled to their former mean."""
    length = store[:, onto].norm(dim=-1).mean()
    total = store.index_add(1, at, store[:, leaving])
    sums = total[:, onto]
    return total.index_copy(1, onto, length * sums / (sums.norm(dim=-1, keepdim=True) + EPSILON))
