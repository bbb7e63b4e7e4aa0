"""Attention of decoding steps that reads the cache once without copying it.

transformers' sdpa path repeats keys and values for every query head of a group as soon as there is a mask, which every
window of several tokens has: a copy of the complete cache, in every layer, at every call. Here the heads of a group
become additional queries of the same key head instead, and one call of the same kernel serves all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

#: Name of `folded_attention` in transformers; models configured otherwise are not affected.
NAME = "espalier_folded"

#: Spare keys in the mask of an answer's steps.
ROOM = 256


@contextmanager
def fold_heads(configs: Sequence[Any]) -> Iterator[bool]:
    """Run a text stack with folded heads instead of sdpa; other implementations stay.

    The stack's configuration names the function, so other models are not affected. Nested uses only read it: callers
    that run many steps, or share one model among threads, open it once around all of them.

    Args:
        configs: `attention_configs` of the stack.

    Yields:
        Whether heads are folded.
    """
    before = [config._attn_implementation for config in configs]
    if any(name not in ("sdpa", NAME) for name in before):
        yield False
        return
    changed = [config for config, name in zip(configs, before, strict=True) if name == "sdpa"]
    register_folded()
    try:
        for config in changed:
            config._attn_implementation = NAME
        yield True
    finally:
        for config in changed:
            config._attn_implementation = "sdpa"


def register_folded() -> None:
    """Register `folded_attention` in transformers under its name; watchers of sdpa have to watch this name as well."""
    if NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(NAME, folded_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_configs(decoder: Any) -> list[Any]:
    """Return the configurations that name the attention of a text stack, each once."""
    layers = (getattr(layer, "self_attn", None) for layer in decoder.layers)
    configs = [decoder.config, *(layer.config for layer in layers if layer is not None)]
    return list({id(config): config for config in configs}.values())


def folded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with the query heads of each group folded into the query's length.

    Args:
        module: the attention module.
        query: (B, H, t, D).
        key: (B, H_kv, S, D).
        value: (B, H_kv, S, D_v).
        attention_mask: (B or 1, H or 1, t, S or more), boolean or added to the logits, `window_mask`, `chain_mask` or
            that of a `RowMask`; a mask wider than the keys is cut on the left, where layers of one stack may hold more
            or fewer tokens. None with t = 1: all keys are seen. None with t > 1 is a prefill, done by the library's
            function.
        dropout: as in sdpa.
        scaling: factor of the logits.
        **kwargs: further arguments of transformers' function.

    Returns:
        (B, t, H, D_v), None.

    Cost: query and output are copied once; keys and values are only read.
    """
    batch, heads, length, width = query.shape
    key_heads = key.shape[1]
    if attention_mask is None and length > 1:
        return sdpa_attention_forward(
            module, query, key, value, None, dropout=dropout, scaling=scaling, **kwargs
        )
    groups = heads // key_heads
    mask = None
    if attention_mask is not None:
        mask = _fold(attention_mask[..., -key.shape[2] :], groups, length)
    if groups > 1:
        query = query.reshape(batch, key_heads, groups * length, width)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    if groups > 1:
        output = output.reshape(batch, heads, length, value.shape[-1])
    return output.transpose(1, 2).contiguous(), None


def _fold(mask: Tensor, groups: int, length: int) -> Tensor:
    """Return a mask (B, H or 1, t, S) as (B, H_kv or 1, groups * t, S).

    A mask already folded stays, or loses the repetitions for heads that a layer does not share.
    """
    if mask.shape[1] == 1 and mask.shape[2] > groups * length:
        return mask[:, :, : groups * length]
    if groups == 1 or mask.shape[2] == groups * length:
        return mask
    if mask.shape[1] == 1:
        return mask.repeat(1, 1, groups, 1)
    return mask.reshape(mask.shape[0], -1, groups * length, mask.shape[3])


def window_mask(visible: Tensor, keys: int, groups: int, dtype: torch.dtype) -> Tensor:
    """Return the mask (1, 1, groups * t, keys) of t new tokens, to be added to the logits of every layer.

    Built once for all layers, in the model's dtype: every layer would convert a boolean mask again.

    Args:
        visible: (t, s) which of the last s keys each token sees; it sees all earlier ones.
        keys: of the layer with most.
        groups: query heads that share a key head, 1 for attention that does not fold.
        dtype: of the queries.
    """
    mask = torch.zeros(visible.shape[0], keys, dtype=dtype, device=visible.device)
    mask[:, keys - visible.shape[1] :].masked_fill_(~visible, float("-inf"))
    return _for_groups(mask, groups)


def chain_mask(
    count: int, keys: int, groups: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the `window_mask` of `count` new tokens that see all earlier ones and themselves, in fewer operations."""
    hidden = torch.full((count, keys), float("-inf"), dtype=dtype, device=device)
    return _for_groups(hidden.triu_(keys - count + 1), groups)


def step_mask(slot: Tensor, keys: int, groups: int, dtype: torch.dtype) -> Tensor:
    """Return the mask (1, 1, groups, keys) of one new token at `slot` (1,) that sees the slots up to its own.

    The hidden keys depend on the tensor only, so that recorded operations hide other keys when the slot changes.
    """
    hidden = torch.arange(keys, device=slot.device) > slot
    mask = torch.zeros(1, keys, dtype=dtype, device=slot.device)
    return _for_groups(mask.masked_fill_(hidden, float("-inf")), groups)


def _for_groups(mask: Tensor, groups: int) -> Tensor:
    """Return a mask (t, keys) as (1, 1, groups * t, keys); copied only if there are several groups."""
    return mask.expand(groups, -1, -1).reshape(1, 1, -1, mask.shape[1])


class RowMask:
    """The mask of one new token a row: it sees the valid slots of a prompt, and everything after the prompt.

    It is built once with room for many steps, and every step shows one more key of it.

    Args:
        valid: (B, M) visible slots of the prompt.
        groups: query heads that share a key head.
        dtype: of the queries.
    """

    def __init__(self, valid: Tensor, groups: int, dtype: torch.dtype) -> None:
        self._valid, self._groups, self._dtype = valid, groups, dtype
        self._mask = self._build(0)

    def of(self, keys: int) -> Tensor:
        """Return (B, 1, groups, keys), to be added to the logits. Cost: none, except in one step of `ROOM`."""
        if keys > self._mask.shape[-1]:
            self._mask = self._build(keys)
        return self._mask[..., :keys]

    def _build(self, keys: int) -> Tensor:
        rows, slots = self._valid.shape
        # Kernels need rows that start at multiples of 16 bytes, and copy a mask with other rows.
        room = -(-(max(keys, slots) + ROOM) // ROOM) * ROOM
        mask = torch.zeros(rows, 1, 1, room, dtype=self._dtype, device=self._valid.device)
        mask[:, 0, 0, :slots].masked_fill_(~self._valid, float("-inf"))
        return mask.expand(-1, -1, self._groups, -1).contiguous()
