"""Attention heads of a model under tensor parallelism: each process has some of them, methods see all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


def all_heads(module: nn.Module, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the queries (B, H, M, D) and keys (B, H_kv, S, D) of an attention module with the heads of all processes.

    Cost: nothing where the module has all of its heads; otherwise one exchange of both.
    """
    heads = getattr(getattr(module, "config", None), "num_attention_heads", query.shape[1])
    if query.shape[1] >= heads:
        return query, key
    return _gathered(query), _gathered(key)


def process_rows(rows: Tensor, shards: int) -> Tensor:
    """Return the rows of this process from rows (R, ...) for all heads; a single row belongs to every process.

    `shards` is the number of processes that share the heads.
    """
    return rows if shards == 1 or len(rows) == 1 else rows.chunk(shards)[dist.get_rank()]


def _gathered(heads: Tensor) -> Tensor:
    parts = [heads.new_empty(heads.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, heads.contiguous())
    return torch.cat(parts, dim=1)
