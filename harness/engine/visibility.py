"""Attention visibility: which keys each query of the text stack attends to, and how many queries see a key.

Slots count a prompt and its answer from 0, padding included. This is about positions only: whether a slot may be seen
at all (padding, dropped tokens) is stored in `valid`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Visibility(ABC):
    """The keys that each query sees, by their slots."""

    @abstractmethod
    def sees(self, queries: Tensor, n_keys: int) -> Tensor:
        """Return (..., R, n_keys): whether the query in each slot of `queries` (R,) or (B, R) sees each key."""

    @abstractmethod
    def seen_by(self, valid: Tensor) -> Tensor:
        """Return how many valid queries see each key of (B, S), at least 1; broadcastable to (B, S)."""


@dataclass(frozen=True)
class Causal(Visibility):
    """A query sees the keys up to its own."""

    def sees(self, queries: Tensor, n_keys: int) -> Tensor:
        """Return whether each key is at or before its query."""
        return _slots(n_keys, queries) <= queries.unsqueeze(-1)

    def seen_by(self, valid: Tensor) -> Tensor:
        """Count for key j the valid queries at j or later."""
        return valid.flip(1).cumsum(1).flip(1).clamp(min=1)


@dataclass(frozen=True)
class Bidirectional(Visibility):
    """Every query sees every key."""

    def sees(self, queries: Tensor, n_keys: int) -> Tensor:
        """Return True everywhere."""
        return torch.ones(*queries.shape, n_keys, dtype=torch.bool, device=queries.device)

    def seen_by(self, valid: Tensor) -> Tensor:
        """Count all valid queries, (B, 1)."""
        return valid.sum(1, keepdim=True).clamp(min=1)


@dataclass(frozen=True, eq=False)
class Prefix(Visibility):
    """Every query sees the whole prefix; after the prefix, a query sees the keys up to its own.

    Attributes:
        ends: (B,) first slot of each row after its prefix, padding on the left counted.
    """

    ends: Tensor

    def sees(self, queries: Tensor, n_keys: int) -> Tensor:
        """Return (B, R, n_keys): whether each key is in the row's prefix, or at or before its query."""
        slots = _slots(n_keys, queries)
        inside = slots < self.ends.to(queries.device)[:, None, None]
        return inside | (slots <= queries.unsqueeze(-1))

    def seen_by(self, valid: Tensor) -> Tensor:
        """Count all valid queries for keys of the prefix, and for others the valid queries at the key or later."""
        inside = _slots(valid.shape[1], valid) < self.ends.to(valid.device).unsqueeze(1)
        return torch.where(inside, Bidirectional().seen_by(valid), Causal().seen_by(valid))

    def gathered(self, index: Tensor, valid: Tensor) -> Prefix:
        """Return the prefix of a shortened batch with the slots `index` (B, M), those real that are `valid`."""
        after_prefix = (index >= self.ends.to(index.device).unsqueeze(1)) & valid
        return Prefix(index.shape[1] - after_prefix.sum(1))


@dataclass(frozen=True, eq=False)
class VisualBlocks(Visibility):
    """A query sees the keys up to its own and all of its block; with a window, no key that lies further back.

    Attributes:
        blocks: (B, S) number of each slot's block, -1 outside blocks.
        positions: (B, S) of each slot.
        window: positions that a query sees back, its own included; None: all.
        span: bound of the positions, known on the host.
        cut: whether a window hides tokens of the query's block too.
    """

    blocks: Tensor
    positions: Tensor
    window: int | None = None
    span: int = 0
    cut: bool = True

    def sees(self, queries: Tensor, n_keys: int) -> Tensor:
        """Return (B, R, n_keys): whether each key is close enough, and up to its query or in the same block."""
        blocks, positions = self.blocks.to(queries.device), self.positions.to(queries.device)
        slots = queries.clamp(min=0).expand(blocks.shape[0], -1)
        own_block = blocks.gather(1, slots).unsqueeze(2)
        visible = _slots(n_keys, queries) <= slots.unsqueeze(2)
        together = (own_block == blocks.unsqueeze(1)) & (own_block >= 0)
        if self.window is None:
            return visible | together
        farthest = positions.gather(1, slots).unsqueeze(2) - self.window
        near = positions.unsqueeze(1) > farthest
        return (visible | together) & near if self.cut else visible & near | together

    def gathered(self, index: Tensor) -> VisualBlocks:
        """Return the blocks of a shortened batch with the slots `index` (B, M)."""
        kept = self.blocks.gather(1, index), self.positions.gather(1, index)
        return VisualBlocks(*kept, self.window, self.span, self.cut)

    def on(self, device: torch.device) -> VisualBlocks:
        """Return the blocks on a device."""
        moved = self.blocks.to(device), self.positions.to(device)
        return VisualBlocks(*moved, self.window, self.span, self.cut)

    def seen_by(self, valid: Tensor) -> Tensor:
        """Count the valid queries, 256 at a time. Cost: O(B S^2)."""
        n_slots = valid.shape[1]
        counts = torch.zeros(valid.shape, dtype=torch.long, device=valid.device)
        for block in _slots(n_slots, valid).split(256):
            counts += (self.sees(block, n_slots) & valid[:, block].unsqueeze(2)).sum(1)
        return counts.clamp(min=1)


#: Default visibility of a text stack.
CAUSAL = Causal()


def visibility_of(config: Any) -> Visibility:
    """Return the visibility of a text stack, read from its configuration as the library reads it (`is_causal`)."""
    return CAUSAL if getattr(config, "is_causal", True) else Bidirectional()


def _slots(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)
