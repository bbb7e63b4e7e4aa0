"""Merging inside a cached prompt: keys and values of dropped tokens are added to those of kept ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, normalize

from espalier.methods.select.topk import indices_of

Targets = Literal["visual", "prompt"]

#: Added to a vector's norm before it is divided by it.
EPSILON = 1e-8


@dataclass(frozen=True, eq=False)
class PromptEntries:
    """The cache entries of one layer for one sample's prompt, and what does not change from step to step.

    Attributes:
        keys: (H, S, D) without their rotary positions, in at least fp32.
        values: (H, S, D_v).
    """

    keys: Tensor
    values: Tensor

    @cached_property
    def units(self) -> Tensor:
        """(S, D) keys, mean over heads, of length 1."""
        return normalize(self.keys.mean(0), dim=-1)

    @cached_property
    def key_norms(self) -> Tensor:
        """(H, S) lengths of keys."""
        norms: Tensor = self.keys.norm(dim=-1)
        return norms

    @cached_property
    def value_norms(self) -> Tensor:
        """(H, S) lengths of values."""
        norms: Tensor = self.values.norm(dim=-1)
        return norms


@dataclass(frozen=True, eq=False)
class KeptEntries:
    """The visual tokens of one sample's prompt that stay in a step; the same in every layer.

    Attributes:
        visual: (N,) entries of the visual tokens, ascending.
        kept: (K,) ascending indices among the N of those that stay.
        count: entries of the prompt, S.
    """

    visual: Tensor
    kept: Tensor
    count: int

    @cached_property
    def leaving(self) -> Tensor:
        """(N - K,) entries that leave, ascending."""
        leaves = torch.ones_like(self.visual, dtype=torch.bool).index_fill(0, self.kept, False)
        return self.visual[indices_of(leaves[None], len(leaves) - len(self.kept))[0]]

    @cached_property
    def staying(self) -> Tensor:
        """(S - N + K,) entries that stay, ascending."""
        alive = self.visual.new_ones(self.count, dtype=torch.bool).index_fill(
            0, self.leaving, False
        )
        return indices_of(alive[None], self.count - len(self.leaving))[0]

    @cached_property
    def staying_visual(self) -> Tensor:
        """(K,) places of the visual tokens that stay among `staying`."""
        return torch.searchsorted(self.staying, self.visual[self.kept])


@dataclass(frozen=True, eq=False)
class Entries:
    """The entries of one layer for one sample's prompt, and which stay in a step. They are read by later steps, too.

    Attributes:
        prompt: the entries.
        choice: those that stay.
    """

    prompt: PromptEntries
    choice: KeptEntries


def merged_entries(entries: Entries, targets: Targets) -> tuple[Tensor, Tensor]:
    """Return keys and values (H, S - N + K, D) of the staying entries, each leaving one merged into the most similar.

    Each leaving entry goes to the target with the highest cosine of keys, mean over heads, the first of equals. Keys
    and values are added, and every target's vector is then scaled, head by head, to the mean former length of targets
    over tokens and heads.

    Args:
        entries: of one layer and sample.
        targets: `visual`: visual tokens that stay; `prompt`: all entries that stay.

    Cost: O((N - K) T D) for the cosines with T targets, O(H (N - K + T) D) for the sums.
    """
    prompt, choice = entries.prompt, entries.choice
    onto = choice.staying if targets == "prompt" else choice.visual[choice.kept]
    slot = (prompt.units[choice.leaving] @ prompt.units[onto].T).argmax(1)
    # Each target's entries one after another: itself, then those that merge into it.
    slots = torch.cat([torch.arange(len(onto), device=slot.device), slot])
    members = torch.cat([onto, choice.leaving])[slots.argsort(stable=True)]
    sizes = torch.zeros_like(onto).scatter_add(0, slots, torch.ones_like(slots))
    starts = sizes.cumsum(0) - sizes
    stores = (prompt.keys, prompt.key_norms), (prompt.values, prompt.value_norms)
    merged = [_summed(store, members, starts, norms[:, onto].mean()) for store, norms in stores]
    if targets == "visual":
        merged = [
            store[:, choice.staying].index_copy(1, choice.staying_visual, sums)
            for (store, _), sums in zip(stores, merged, strict=True)
        ]
    return merged[0], merged[1]


def _summed(store: Tensor, members: Tensor, starts: Tensor, length: Tensor) -> Tensor:
    """Return (H, T, D) sums of the groups of entries that begin at `starts`, scaled to `length` head by head."""
    heads, count, width = store.shape
    # A view where the store is kept entry by entry, as the engine does.
    flat = store.transpose(0, 1).reshape(count, heads * width)
    sums = embedding_bag(members, flat, starts, mode="sum").view(-1, heads, width).transpose(0, 1)
    scaled: Tensor = sums * (length / (sums.norm(dim=-1, keepdim=True) + EPSILON))
    return scaled
