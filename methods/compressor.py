"""The base of methods that compress the KV cache; docs/architecture.md says how the engine will call them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from methods.base import Method


@dataclass(frozen=True)
class CacheView:
    """What a cache compressor may read of one layer after prefill.

    Attributes:
        layer: decoder layer.
        keys: (B, H_kv, N, Dh) keys of the candidate entries, rotary positions applied, one copy for each KV head.
        values: (B, H_kv, N, Dh) their values.
        grid: (B, N, 4) coordinates as in `View`.
        signals: as in `View`; attention signals are those of this very layer.
    """

    layer: int
    keys: Tensor
    values: Tensor
    grid: Tensor
    signals: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheCompressor(Method):
    """Evicts visual entries of the KV cache once, after prefill, each layer by its own budget."""

    @abstractmethod
    def score(self, view: CacheView) -> Tensor:
        """Return (B, H, N) scores of the entries, H = 1 (shared by all heads) or H_kv; larger stays longer."""

    def allocate(self, scores: Sequence[Tensor], keep: int) -> Tensor:
        """Split each sample's `keep * n_layers` entries over its layers.

        Args:
            scores: of each layer, as `score` returned them.
            keep: entries of a layer, on average over the layers.

        Returns:
            (B, layers) integers, or (B, layers, H) where heads keep different numbers. The default gives each layer
            `keep`.
        """
        rows = scores[0].shape[0]
        return torch.full((rows, len(scores)), keep, device=scores[0].device)
