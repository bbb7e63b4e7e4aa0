"""Attention of one prompt, computed again for chosen queries: beside a fused kernel no map is ever held."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Query rows computed at once.
BLOCK = 256


def logits(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Return (H, R, S) scaled products of queries (H, R, D) and keys (H_kv, S, D), in at least fp32.

    Query head h reads key head h // (H / H_kv).
    """
    exact = torch.promote_types(queries.dtype, torch.float32)
    heads, kv_heads = queries.shape[0], keys.shape[0]
    grouped = queries.to(exact).unflatten(0, (kv_heads, heads // kv_heads))
    return torch.matmul(grouped, keys.to(exact).unsqueeze(1).mT).flatten(0, 1) * scaling


def causal(places: Tensor, seen: Tensor) -> Tensor:
    """Return (R, S): whether a query at one place of the prompt may read a key at another."""
    return seen <= places.unsqueeze(1)


def rows(
    queries: Tensor, keys: Tensor, scaling: float, places: Tensor, block: int = BLOCK
) -> Iterator[Tensor]:
    """Yield the attention that the queries at `places` pay to the whole prompt, (H, <= block, L) at a time.

    Args:
        queries: (H, L, D) of the prompt, rotary positions applied.
        keys: (H_kv, L, D).
        scaling: factor of the products.
        places: (R,) slots of the queries that are asked.
        block: query rows computed at once.

    Cost: O(H R L D) time, O(H block L) memory.
    """
    slots = torch.arange(keys.shape[1], device=keys.device)
    for asked in places.split(block):
        hidden = ~causal(asked, slots)
        found = logits(queries[:, asked], keys, scaling)
        yield found.masked_fill_(hidden, float("-inf")).softmax(dim=-1)


def paid(
    queries: Tensor, keys: Tensor, scaling: float, places: Tensor, block: int = BLOCK
) -> Tensor:
    """Return (H, L): what the queries at `places` pay each slot together. Arguments and cost as `rows`."""
    exact = torch.promote_types(queries.dtype, torch.float32)
    total = torch.zeros(queries.shape[0], keys.shape[1], dtype=exact, device=keys.device)
    for attention in rows(queries, keys, scaling, places, block):
        total += attention.sum(dim=1)
    return total


def by_kv_head(values: Tensor, kv_heads: int) -> Tensor:
    """Return (H_kv, ...): the mean over the query heads that read the same key head."""
    found: Tensor = values.unflatten(0, (kv_heads, -1)).mean(dim=1)
    return found
