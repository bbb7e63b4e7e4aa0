"""Merging inside a cached prompt: keys and values of dropped tokens are added to those of kept ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import embedding_bag, normalize

from espalier.methods.select.topk import indices_of

Targets = Literal["visual", "prompt"]

#: Added to a vector's norm before it is divided by it.
EPSILON = 1e-8


@dataclass(frozen=True, eq=False)
class EntryStore:
    """Keys or values of one layer for one sample's prompt, entry by entry.

    Attributes:
        rows: (S, H, D), in at least fp32.
    """

    rows: Tensor

    @cached_property
    def norms(self) -> Tensor:
        """(S, H) lengths of the vectors."""
        norms: Tensor = self.rows.norm(dim=-1)
        return norms

    @property
    def flat(self) -> Tensor:
        """(S, H D) the same storage."""
        return self.rows.view(len(self.rows), -1)


@dataclass(frozen=True, eq=False)
class PromptEntries:
    """The cache entries of one layer for one sample's prompt, and what does not change from step to step.

    Attributes:
        keys: without their rotary positions.
        values: of the same entries.
    """

    keys: EntryStore
    values: EntryStore

    @cached_property
    def units(self) -> Tensor:
        """(S, D) keys, mean over heads, of length 1."""
        return normalize(self.keys.rows.mean(1), dim=-1)


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
    def non_visual(self) -> Tensor:
        """(S - N,) entries of all tokens that are not visual, ascending."""
        is_text = self.visual.new_ones(self.count, dtype=torch.bool).index_fill(
            0, self.visual, False
        )
        return indices_of(is_text[None], self.count - len(self.visual))[0]


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
    """Return keys and values (H, T, D) of the T targets, each leaving entry merged into the most similar of them.

    With k keys without rotary positions, and values v merged like them (D3ToM, arXiv 2511.12280):

        c(i) = argmax_j cos(mean over heads k_i, mean over heads k_j), the first of equals                   (20)
        k_j <- nu_k s / |s|,  s = k_j + sum_{i: c(i) = j} k_i,  head by head                                (21)

    nu is the mean norm of targets before merging, over heads and tokens.

    Args:
        entries: of one layer and sample.
        targets: `visual`: visual tokens that stay; `prompt`: all entries that stay.

    Cost: O((N - K) T D) for the cosines, O(H (N - K + T) D) for the sums.
    """
    prompt, choice, units = entries.prompt, entries.choice, entries.prompt.units
    leaving = choice.leaving
    onto = choice.visual[choice.kept] if targets == "visual" else choice.staying
    # Maxima over rows are found faster than over columns; of equals the first wins.
    slot = (units.index_select(0, onto) @ units.index_select(0, leaving).T).max(0).indices
    # The group of each target, one after another: itself, then those that merge into it.
    targets_in_order = torch.arange(len(onto), device=onto.device)
    slots, order = torch.cat([targets_in_order, slot]).sort(stable=True)
    members = torch.cat([onto, leaving])[order]
    starts = torch.searchsorted(slots, targets_in_order)
    merged = []
    for store in (prompt.keys, prompt.values):
        shape = -1, *store.rows.shape[1:]
        sums = embedding_bag(members, store.flat, starts, mode="sum").view(shape)
        length = store.norms.index_select(0, onto).mean()
        scale = length / (vector_norm(sums, dim=-1, keepdim=True) + EPSILON)
        merged.append(sums.mul_(scale).transpose(0, 1))
    return merged[0], merged[1]
