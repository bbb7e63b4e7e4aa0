"""A key-value cache written by index, and attention of decoding steps that reads it once: nothing stored is copied.

transformers' sdpa path repeats keys and values for every query head of a group as soon as there is a mask, which every
window of several tokens has: a copy of the complete cache, in every layer, at every call. Here the heads of a group
become additional queries of the same key head instead, and one call of the same kernel serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

#: An ordinary answer's cache grows by this many tokens at a time, so that it is copied once in as many steps; the
#: library's is copied at every step.
STEP = 256


class IndexedLayer(CacheLayerMixin):
    """One layer's keys and values in storage with room for `room` tokens more than its first call brings.

    Args:
        room: tokens.
        step: when full, move to storage with room for this many more tokens; 0: never move, as recorded steps need it.

    Raises:
        RuntimeError: more tokens than there is room for, in a layer that does not move.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, room: int, step: int = 0) -> None:
        super().__init__()
        self._room = room
        self._step = step
        self._length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the storage, sized by the first call."""
        self.dtype, self.device = key_states.dtype, key_states.device
        shape = list(key_states.shape)
        shape[2] += self._room
        self._keys = key_states.new_empty(shape)
        self._values = value_states.new_empty(*shape[:3], value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new entries and return views of all. Cost: the new tokens only.

        Heads stay grouped, unless the entries have been replaced by copies for every query head.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        copies = self._keys.shape[1] // key_states.shape[1]
        if copies > 1:
            key_states = key_states.repeat_interleave(copies, dim=1)
            value_states = value_states.repeat_interleave(copies, dim=1)
        count = key_states.shape[2]
        end = self._length + count
        if end > self._keys.shape[2]:
            if not self._step:
                raise RuntimeError(
                    f"the cache has room for {self._keys.shape[2]} tokens, got {end}"
                )
            self._keys = self._enlarge(self._keys, end + self._step)
            self._values = self._enlarge(self._values, end + self._step)
        self._keys.narrow(2, self._length, count).copy_(key_states)
        self._values.narrow(2, self._length, count).copy_(value_states)
        return self._set_length(end)

    def _enlarge(self, store: Tensor, capacity: int) -> Tensor:
        """Return larger storage with the tokens held."""
        larger = store.new_empty(*store.shape[:2], capacity, store.shape[3])
        larger.narrow(2, 0, self._length).copy_(store.narrow(2, 0, self._length))
        return larger

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each row continue from another one, as beams do. Cost: one copy of the tokens held."""
        for store in (self._keys, self._values):
            entries = store.narrow(2, 0, self._length)
            entries.copy_(entries.index_select(0, beam_idx.to(store.device)))

    def crop(self, max_length: int) -> None:
        """Drop all but the first `max_length` tokens, without a copy."""
        if max_length < self._length:
            self._set_length(max_length)

    def keep(self, last: int, kept: Tensor) -> None:
        """Keep those at `kept` (K,), ascending from 0, of the last `last` tokens, moved together. Cost: one copy."""
        start, end = self._length - last, self._length
        stop = start + len(kept)
        for store in (self._keys, self._values):
            store[:, :, start:stop] = store[:, :, start:end].index_select(2, kept.to(store.device))
        self._set_length(stop)

    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Store these keys and values (B, H_kv, S, D) without room, and release the old ones."""
        self._keys, self._values = keys, values
        self._set_length(keys.shape[2])

    @property
    def entries(self) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H_kv, S, D) of the tokens held, as views."""
        return self._keys[:, :, : self._length], self._values[:, :, : self._length]

    @property
    def storage(self) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H_kv, capacity, D): the tokens held, and the room after them."""
        return self._keys, self._values

    def grow(self) -> None:
        """Count one more token as held, after it was written into the storage."""
        self._set_length(self._length + 1)

    def _set_length(self, length: int) -> tuple[Tensor, Tensor]:
        self._length = length
        self.keys, self.values = self._keys.narrow(2, 0, length), self._values.narrow(2, 0, length)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the tokens held."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys `query_length` new tokens will see, from the first on."""
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        """Return -1, no bound: the caller requested the room it needs."""
        return -1


class MergedLayer(IndexedLayer):
    """A layer of one step, computed when it is reached.

    Args:
        make: returns keys and values (B, H_kv, S, D), from those of the tokens that run.
    """

    def __init__(self, make: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__(room=0)
        self._make = make

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the entries of the step."""
        return self._make(key_states, value_states)


class IndexedCache(Cache):
    """An empty cache with room for `room` tokens after the prompt in each layer, growing by `step` (0: never)."""

    def __init__(self, n_layers: int, room: int, step: int = 0) -> None:
        #: The layers, for callers that read one at a time.
        self.indexed = tuple(IndexedLayer(room, step) for _ in range(n_layers))
        super().__init__(layers=[*self.indexed])

    def cut(self, count: int, layers: int | None = None) -> None:
        """Drop the last `count` tokens of every layer, or of the first `layers`, regardless of their lengths."""
        for layer in self.indexed[:layers]:
            layer.crop(layer.get_seq_length() - count)

    def keep(self, last: int, kept: Tensor) -> None:
        """Keep those at `kept` (K,), ascending from 0, of the last `last` tokens of every layer."""
        for layer in self.indexed:
            layer.keep(last, kept)

    def copy(self, source_cache: IndexedCache, before: int, length: int) -> None:
        """Append `length` tokens of `other`, in every layer those that start `before` tokens from its end."""
        for layer, source in zip(self.indexed, source_cache.indexed, strict=True):
            start = source.get_seq_length() - before
            keys, values = source.entries
            layer.update(keys[:, :, start : start + length], values[:, :, start : start + length])

    def gather(self, source_cache: IndexedCache, slots: Tensor) -> None:
        """Start with the tokens `slots` (layers, M) of each layer of `other`; costs one copy of these."""
        for layer, source, chosen in zip(self.indexed, source_cache.indexed, slots, strict=True):
            keys, values = source.entries
            index = chosen.to(keys.device)
            layer.update(keys.index_select(2, index), values.index_select(2, index))

    @property
    def storage(self) -> list[tuple[Tensor, Tensor]]:
        """Storage that every layer writes into; its address does not change during the cache's life."""
        return [layer.storage for layer in self.indexed]

    def blank(self) -> None:
        """Zero the room after the tokens held, for readers of the full storage: a masked NaN would still be NaN."""
        for layer in self.indexed:
            for store in layer.storage:
                store[:, :, layer.get_seq_length() :].zero_()

    def grow(self) -> None:
        """Count one more token as held in every layer."""
        for layer in self.indexed:
            layer.grow()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that each layer holds."""
        return tuple(layer.get_seq_length() for layer in self.indexed)


class WindowLayer(DynamicSlidingWindowLayer):
    """A layer's window of keys and values, without the storage of the prompt that filled it."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new entries and return those that they may see."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if key_states.shape[2] > 1:
            window = slice(1 - self.sliding_window, None)
            self.keys, self.values = keys[:, :, window].clone(), values[:, :, window].clone()
        return keys, values


def entries_of(cache_layer: Any) -> int:
    """Return the tokens that a filled layer of any class holds: none in a state of linear attention."""
    keys = getattr(cache_layer, "keys", None)
    return 0 if keys is None else int(keys.shape[-2])


def answer_cache(
    decoder: Any, windows: Sequence[int | None] = (), states: Sequence[int] = ()
) -> Cache:
    """Return an empty cache for an ordinary answer of any length, with one row or several, beams included.

    After the prefill it holds the prompt and no room, so that its storage equals the cache bytes in the answer's
    record.

    Args:
        decoder: text stack.
        windows: for each layer, None, or the last tokens that it holds, the new one included; empty: all hold all.
        states: layers of linear attention.
    """
    if not any(windows) and not states:
        return IndexedCache(len(decoder.layers), room=0, step=STEP)
    layers: list[Any] = [
        IndexedLayer(room=0, step=STEP) if window is None else WindowLayer(window)
        for window in windows or [None] * len(decoder.layers)
    ]
    for layer in states:
        layers[layer] = LinearAttentionLayer()
    return Cache(layers=layers)


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
    mask = (
        None
        if attention_mask is None
        else _fold(attention_mask[..., -key.shape[2] :], groups, length)
    )
    if groups > 1:
        query = query.reshape(batch, key_heads, groups * length, width)
    output = functional.scaled_dot_product_attention(
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
