"""Attention rollout without storing an N x N map: rows times one block of the map at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from espalier.harness.engine.attention_probe import attention_rows

#: Queries (B, H, S, Dh), keys (B, H_kv, S, Dh) and scaling of one layer.
LayerHeads = tuple[Tensor, Tensor, float]

#: Maps the number of a layer and a slice of query slots to the keys they see, broadcastable to (B, 1, R, S); None for
#: all.
VisibleKeys = Callable[[int, slice], Tensor | None]


def rollout(
    layers: Sequence[LayerHeads], start: Tensor, visible: VisibleKeys, block: int = 256
) -> Tensor:
    """Return `start` (B, R, S) times the product of 0.5 A + 0.5 I over layers, last layer first, A the mean over heads.

    Cost: O(H S^2 Dh + R S^2) a layer; memory O(H block S).
    """
    rows = start
    for number, (query, key, scaling) in reversed(list(enumerate(layers))):
        attended = torch.zeros_like(rows)
        for first in range(0, query.shape[2], block):
            block_slots = slice(first, first + block)
            queries, visible_keys = query[:, :, block_slots], visible(number, block_slots)
            weights = attention_rows(queries, key, scaling, visible_keys)
            attended += rows[:, :, block_slots] @ weights.to(rows.dtype)
        rows = 0.5 * rows + 0.5 * attended
    return rows
