"""Steps of one token with shapes that stay constant while an answer grows, so that one recording serves many steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from espalier.harness.engine.model_parts import ModelParts
from espalier.harness.engine.text.cuda_graphs import Graphs
from espalier.harness.engine.text.kv_cache import IndexedCache
from espalier.harness.engine.text.step_attention import step_mask

#: A recording attends to a multiple of this many slots; a new one is made when an answer outgrows it. This limits both
#: the number of unused slots read and the number of recordings.
BUCKET = 256


@dataclass(frozen=True)
class TextForward:
    """Forward of a token: embedding, layers, head."""

    embed: nn.Module
    decoder: Any
    head: nn.Module

    def __call__(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache) -> Tensor:
        """Return the logits (B, t, V) after the tokens `ids` (B, t) at `positions` (..., B, t)."""
        hidden = self.decoder(
            inputs_embeds=self.embed(ids),
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        logits: Tensor = self.head(hidden)
        return logits

    @classmethod
    def of(cls, adapter: ModelParts) -> TextForward:
        """Return the text stack of a loaded model."""
        model = adapter.model
        return cls(model.get_input_embeddings(), adapter.decoder, model.get_output_embeddings())


class FixedCache(Cache):
    """A cache that writes one token at `slot` (1,) of its storage and shows the first `keys` slots, filled or not."""

    def __init__(self, cache: IndexedCache, slot: Tensor, keys: int) -> None:
        super().__init__(layers=cache.layers)
        self._storage, self._slot, self._n_keys = cache.storage, slot, keys

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one token. The caller counts the tokens held, since a recorded step cannot change a number here."""
        keys, values = self._storage[layer_idx]
        keys.index_copy_(2, self._slot, key_states)
        values.index_copy_(2, self._slot, value_states)
        return keys[:, :, : self._n_keys], values[:, :, : self._n_keys]


@dataclass(frozen=True)
class FixedStep:
    """One token through the text stack: a function of tensors with constant shapes and operations.

    Attributes:
        text: the stack.
        cache: has its prompt, and zeros in the room after it.
        following: (..., 1, 1) position of the answer's first token.
        groups: query heads that share a key head.
        dtype: of the queries.
        keys: slots that the step attends to.
    """

    text: TextForward
    cache: IndexedCache
    following: Tensor
    groups: int
    dtype: torch.dtype
    keys: int

    def __call__(self, ids: Tensor, slot: Tensor, place: Tensor) -> Tensor:
        """Return the logits (1, V) after a token.

        Args:
            ids: (1, 1).
            slot: (1,) of the cache, where the token is written.
            place: (1,) of the token in the answer.
        """
        mask = step_mask(slot, self.keys, self.groups, self.dtype)
        into = FixedCache(self.cache, slot, self.keys)
        return self.text(ids, self.following + place, mask, into)[0]


class FixedSteps:
    """The steps of one answer, each recorded when its number of slots is first needed.

    Args:
        text: the stack.
        cache: contains its prompt; all layers hold the same number of tokens.
        following: as in `FixedStep`.
        shape: groups and dtype of `FixedStep`.
        graphs: records the steps.
    """

    def __init__(
        self,
        text: TextForward,
        cache: IndexedCache,
        following: Tensor,
        shape: tuple[int, torch.dtype],
        graphs: Graphs,
    ) -> None:
        self._text, self._cache, self._following = text, cache, following
        self._shape, self._graphs = shape, graphs
        self._capacity = cache.storage[0][0].shape[2]
        # Recordings read and write at these addresses: values are copied in, and the tensors are never replaced.
        self._ids = torch.zeros(1, 1, dtype=torch.long, device=following.device)
        self._slot, self._place = self._ids[0].clone(), self._ids[0].clone()
        self._replays: dict[int, Callable[[], Tensor]] = {}
        cache.blank()

    def run(self, ids: Tensor, place: int) -> Tensor:
        """Run one token `ids` (1,) at `place` of the answer and return the logits (1, V) after it.

        Raises:
            RuntimeError: the cache is full.
        """
        slot = self._cache.lengths[0]
        if slot == self._capacity:
            raise RuntimeError(f"the cache has room for {slot} tokens, got {slot + 1}")
        self._ids.copy_(ids[None])
        self._slot.fill_(slot)
        self._place.fill_(place)
        logits = self._replay(slot)()
        self._cache.grow()
        return logits.clone()  # the next replay overwrites it

    def _replay(self, slot: int) -> Callable[[], Tensor]:
        keys = min(-(-(slot + 1) // BUCKET) * BUCKET, self._capacity)
        if keys not in self._replays:
            step = FixedStep(self._text, self._cache, self._following, *self._shape, keys)
            inputs = self._ids, self._slot, self._place
            self._replays[keys] = self._graphs.capture(step, inputs)
        return self._replays[keys]
