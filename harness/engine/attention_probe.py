"""Attention scores and rollouts alongside the fused kernel: only the required query rows, in at least fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from espalier.harness.engine.kv_cache import NAME, register_folded
from espalier.harness.engine.layout import CAUSAL, Visibility
from espalier.harness.engine.model_parts import remove_hooks
from espalier.harness.errors import UserError
from espalier.harness.specs.comparable import grouped

#: Receives (query (B, H, Q, Dh), key (B, H_kv, S, Dh), scaling) of one attention call.
Watcher = Callable[[Tensor, Tensor, float], None]


class AttentionTap:
    """Shows watchers the queries and keys of chosen attention modules while the modules' kernel runs unchanged.

    The attention functions in use are wrapped under their own names, so mask creation and kernel choice do not change,
    and are restored on exit. torch's attention module, as in pooling heads, is watched by a hook on its input.

    Raises:
        UserError: a watched module runs eager attention, which transformers does not dispatch through its table.
    """

    def __init__(self, watchers: Iterable[tuple[nn.Module, Watcher]]) -> None:
        self._watchers = grouped(watchers)
        self._pooling = [m for m in self._watchers if isinstance(m, nn.MultiheadAttention)]
        self._handles: list[RemovableHandle] = []
        configs: list[Any] = [m.config for m in self._watchers if m not in self._pooling]
        names = {str(config._attn_implementation) for config in configs}
        if "eager" in names:
            raise UserError(
                "model.attention='eager' hides the queries that this method scores with; "
                "valid: sdpa, flash_attention_2"
            )
        if "sdpa" in names:  # decoding steps may run it by folded heads
            register_folded()
            names.add(NAME)
        self._names = sorted(names)
        self._originals: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> AttentionTap:
        for name in self._names:
            self._originals[name] = ALL_ATTENTION_FUNCTIONS[name]
            AttentionInterface.register(name, self._wrap(self._originals[name]))
        self._handles = [m.register_forward_pre_hook(self._before_pooling) for m in self._pooling]
        return self

    def __exit__(self, *error: object) -> None:
        for name, original in self._originals.items():
            AttentionInterface.register(name, original)
        self._originals.clear()
        remove_hooks(self._handles)

    def show(self, module: nn.Module, query: Tensor, key: Tensor, scaling: float) -> None:
        """Show a module's watchers the queries and keys of a stored run."""
        for watcher in self._watchers.get(module, ()):
            watcher(query, key, scaling)

    def _before_pooling(self, module: nn.MultiheadAttention, args: tuple[Tensor, ...]) -> None:
        """Project the module's inputs (batch first) to the queries and keys of its heads."""
        weights, biases = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
        query, key = (
            linear(value, weight, bias).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
            for value, weight, bias in zip(args[:2], weights[:2], biases[:2], strict=True)
        )
        self.show(module, query, key, module.head_dim**-0.5)

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            if module in self._watchers:
                scaling = kwargs.get("scaling")
                scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
                queries, keys = all_heads(module, query, key)
                boundaries = kwargs.get("cu_seq_lens_q")
                sequences: Iterable[tuple[Tensor, Tensor]] = [(queries, keys)]
                if boundaries is not None:  # flash attention over several images at once
                    lengths = boundaries.diff().tolist()
                    sequences = zip(queries.split(lengths, 2), keys.split(lengths, 2), strict=True)
                for sequence in sequences:
                    self.show(module, *sequence, scaling)
            return original(module, query, key, value, *args, **kwargs)

        return attention


def attention_rows(query: Tensor, key: Tensor, scaling: float, visible: Tensor | None) -> Tensor:
    """Return (B, R, S): `head_rows`, mean over heads."""
    return head_rows(query, key, scaling, visible).mean(1)


def head_rows(query: Tensor, key: Tensor, scaling: float, visible: Tensor | None) -> Tensor:
    """Return the attention probabilities of a few query rows in every head.

    Args:
        query: (B, H, R, Dh) the query rows, rotary positions applied.
        key: (B, H_kv, S, Dh) all keys; query head h reads key head h // (H / H_kv).
        scaling: factor of the logits.
        visible: boolean, broadcastable to (B, 1, R, S), which keys each row may see; None for all.

    Returns:
        (B, H, R, S) in fp32, or fp64 for fp64 inputs. Cost: O(H R S Dh).
    """
    n_batch, n_heads, n_rows, _ = query.shape
    accumulator = torch.promote_types(query.dtype, torch.float32)
    grouped = query.reshape(n_batch, key.shape[1], n_heads // key.shape[1], n_rows, query.shape[3])
    logits = torch.einsum("bkgrd,bksd->bkgrs", grouped.to(accumulator), key.to(accumulator))
    logits = logits.reshape(n_batch, n_heads, n_rows, key.shape[2]) * scaling
    if visible is not None:
        logits = logits.masked_fill(~visible, torch.finfo(accumulator).min)
    return logits.softmax(-1)


def last_row(query: Tensor, key: Tensor, scaling: float, valid: Tensor) -> Tensor:
    """Return (B, S): attention of the last query to each key that it sees, `valid` (B, S).

    Batches are left-padded, so the last slot is real.
    """
    return attention_rows(query[:, :, -1:], key, scaling, valid[:, None, None, :])[:, 0]


def received_mean(
    query: Tensor,
    key: Tensor,
    scaling: float,
    valid: Tensor,
    block: int = 256,
    visibility: Visibility = CAUSAL,
) -> Tensor:
    """Return (B, S): attention each key receives, mean over heads and the real queries that may see it.

    The map is built in blocks of `block` rows, so memory is O(H block S) instead of O(H S^2).
    """
    n_slots = key.shape[2]
    slot = torch.arange(n_slots, device=key.device)
    total = torch.zeros(
        valid.shape, dtype=torch.promote_types(query.dtype, torch.float32), device=key.device
    )
    for start in range(0, n_slots, block):
        visible_by_slot = visibility.sees(slot[start : start + block], n_slots)
        visible = (visible_by_slot & valid[:, None, :])[:, None]
        weights = attention_rows(query[:, :, start : start + block], key, scaling, visible)
        total += (weights * valid[:, start : start + block, None]).sum(1)
    return total / visibility.seen_by(valid)


def query_rows(
    query: Tensor,
    key: Tensor,
    scaling: float,
    valid: Tensor,
    slots: Tensor,
    block: int = 256,
    visibility: Visibility = CAUSAL,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the attention of the queries in some slots to each key, `block` of them at a time.

    Args:
        query: (B, H, S, Dh) rotary positions applied.
        key: (B, H_kv, S, Dh).
        scaling: factor of the logits.
        valid: (B, S) slots that may be attended to.
        slots: (B, R) slots of the queries, -1 where a row has fewer.
        block: queries at a time.
        visibility: attention visibility.

    Yields:
        weights: (B, H, r, S) in at least fp32; values of rows that are not real are meaningless.
        real: (B, r, 1) which rows are real.

    Cost: O(H R S Dh); memory O(H block S).
    """
    rows = torch.arange(slots.shape[0], device=key.device).unsqueeze(1)
    for slot_block in slots.split(block, dim=1):
        queries = query.transpose(1, 2)[rows, slot_block.clamp(min=0)].transpose(1, 2)
        visible = visibility.sees(slot_block, key.shape[2]) & valid.unsqueeze(1)
        weights = head_rows(queries, key, scaling, visible.unsqueeze(1))
        yield weights, (slot_block >= 0).unsqueeze(2)


def word_rows(
    query: Tensor,
    key: Tensor,
    scaling: float,
    valid: Tensor,
    words: Tensor,
    block: int = 256,
    visibility: Visibility = CAUSAL,
) -> Tensor:
    """Return (B, T, S): attention of the queries in the slots `words` (B, T) to each key, 0 where the slot is -1.

    The rows are computed in blocks of `block`, so memory beyond the result is O(H block S).
    """
    row_blocks = query_rows(query, key, scaling, valid, words, block, visibility)
    return torch.cat([weights.mean(1) * real for weights, real in row_blocks], dim=1)


def received_unmasked(query: Tensor, key: Tensor, scaling: float, block: int = 256) -> Tensor:
    """Return (B, S): attention each key receives without a mask, mean over heads and queries; blocks as above."""
    total = torch.zeros((), device=key.device)
    for rows in query.split(block, dim=2):
        total = total + attention_rows(rows, key, scaling, None).sum(1)
    return total / query.shape[2]


def mean_logits(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Return (B, S): logits of each key before the softmax, mean over heads and queries. Cost: O(H S Dh).

    Logits are linear in the query, so the mean over queries is the logit of the mean query.
    """
    accumulator = torch.promote_types(query.dtype, torch.float32)
    mean_query = query.to(accumulator).mean(2)
    keys = key.to(accumulator).repeat_interleave(query.shape[1] // key.shape[1], 1)
    return torch.einsum("bhd,bhsd->bs", mean_query, keys) * (scaling / query.shape[1])


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
