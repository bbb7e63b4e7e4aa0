"""Attention of one prompt, recomputed for chosen queries, since a fused kernel stores no map."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Query rows computed at once, fewer if they would need more than CELLS products.
BLOCK = 256
CELLS = 2**24
#: On a CPU, products of all rows computed at once: they stay in its cache from the product to the sum.
TILE = 2**20


def logits(queries: Tensor, keys: Tensor, scaling: float, out: Tensor | None = None) -> Tensor:
    """Return (H, R, S) scaled products of queries (H, R, D) and keys (H_kv, S, D), in at least fp32.

    Query head h reads key head h // (H / H_kv). `out` (H_kv, R H / H_kv, S) is memory for them; None: new memory.
    """
    exact = torch.promote_types(queries.dtype, torch.float32)
    heads, n_rows, width = queries.shape
    # Heads that read the same keys are rows of one product, so that keys are not copied for each head.
    grouped = queries.to(exact).reshape(keys.shape[0], -1, width)
    products = torch.bmm(grouped, keys.to(exact).mT, out=out).view(heads, n_rows, -1)
    return products if scaling == 1 else products.mul_(scaling)


def causal(places: Tensor, key_slots: Tensor) -> Tensor:
    """Return (R, S) booleans: whether a query at one place of the prompt may read the key at another."""
    return key_slots <= places.unsqueeze(1)


def rows(
    queries: Tensor,
    keys: Tensor,
    scaling: float,
    places: Tensor | None,
    block: int = BLOCK,
    key_slots: Tensor | None = None,
    memory: Tensor | None = None,
) -> Iterator[Tensor]:
    """Yield the attention of the queries at `places`, (H, <= block, S) at a time, without waiting for the device.

    Of all queries, each of several blocks ends at the last key that it may read: attention beyond it is zero.

    Args:
        queries: (H, L, D) of the prompt, rotary positions applied.
        keys: (H_kv, S, D).
        scaling: factor of the products.
        places: (R,) slots of the queries; None: every slot of the prompt, which are those of the keys too.
        block: query rows computed at once, at most.
        key_slots: (S,) slots of the keys; None: every slot of the prompt.
        memory: (H S or more,) memory for as many products at once, where each block overwrites the one before; None:
            new memory for each, of CELLS products or one row.

    Cost: O(H R S D) time, half of it for all rows; memory of the keys in fp32 and of the products.
    """
    slots = torch.arange(keys.shape[1], device=keys.device) if key_slots is None else key_slots
    keys = keys.to(torch.promote_types(queries.dtype, torch.float32))
    cells = CELLS if memory is None else len(memory)
    height = max(min(block, cells // (queries.shape[0] * len(slots))), 1)
    queried = slots if places is None else places
    for first in range(0, len(queried), height):
        query_slots, start, end = queried[first : first + height], 0, len(slots)
        if places is None and len(queried) > height:
            start, end = first + 1, first + len(query_slots)
        n_products = queries.shape[0] * len(query_slots) * end
        out = None if memory is None else memory[:n_products].view(keys.shape[0], -1, end)
        scores = logits(queries[:, query_slots], keys[:, :end], scaling, out)
        # Keys before `start` are visible to all of these queries.
        hidden = ~causal(query_slots, slots[start:end])
        scores[:, :, start:].masked_fill_(hidden, float("-inf"))
        # Rebound, so that products in new memory are freed.
        scores = torch.softmax(scores, dim=-1, out=None if memory is None else scores)
        yield scores


def paid(
    queries: Tensor,
    keys: Tensor,
    scaling: float,
    places: Tensor | None,
    block: int = BLOCK,
    key_slots: Tensor | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """Return (H, S) the attention of the queries at `places` to each key, summed. Arguments and cost as `rows`.

    `counted` (R,) leaves out the queries for which it is False. For more queries than one block the keys are scaled,
    once; on a CPU each KV head is summed tile by tile, in memory that is touched for the first time only once.
    """
    exact = torch.promote_types(queries.dtype, torch.float32)
    keys, parts, memory = keys.to(exact), 1, None
    total = torch.zeros(queries.shape[0], keys.shape[1], dtype=exact, device=keys.device)
    if (queries.shape[1] if places is None else len(places)) > block:
        keys, scaling = keys * scaling, 1.0
        if keys.device.type == "cpu":
            parts = keys.shape[0]
            memory = total.new_empty(max(min(TILE, CELLS), total.numel() // parts))
    heads = (states.chunk(parts) for states in (queries, keys, total))
    for head_queries, head_keys, head_total in zip(*heads, strict=True):
        blocks = rows(head_queries, head_keys, scaling, places, block, key_slots, memory)
        first = 0
        for attention in blocks:
            if counted is not None:
                left_out = ~counted[first : first + attention.shape[1]].unsqueeze(1)
                first += attention.shape[1]
                attention = attention.masked_fill_(left_out, 0)
            head_total[:, : attention.shape[-1]] += attention.sum(dim=1)
    return total


def by_kv_head(values: Tensor, kv_heads: int) -> Tensor:
    """Return (H_kv, ...): the mean over the query heads that read the same key head."""
    means: Tensor = values.unflatten(0, (kv_heads, -1)).mean(dim=1)
    return means
