"""New tokens through the text stack of a loaded model, after the contents of a cache.

Steps of one token are recorded as CUDA graphs where the model allows it. A step of a small model is hundreds of kernels
of a few microseconds each, and launching them from Python can take longer than running them; a graph is launched as a
whole. It stores addresses and numbers: a step may read nothing from the device, and everything that changes between two
steps must be in a tensor at a fixed address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from espalier.harness.engine.engine_guards import check_recordable
from espalier.harness.engine.kv_cache import (
    IndexedCache,
    attention_configs,
    chain_mask,
    fold_heads,
    step_mask,
    window_mask,
)
from espalier.harness.engine.model_parts import ModelParts
from espalier.harness.errors import Refused, UserError
from espalier.harness.specs.conflicts import refuse
from espalier.harness.specs.run_spec import Auto


class TextStack:
    """Runs new tokens, in a row or branching, and appends their keys and values to its cache.

    Everything that is constant over steps is looked up once, here: on a small model a step is mostly Python.

    Args:
        adapter: the model.
        room: tokens that the cache has room for after the prompt.
        graphs: records steps of one token and replays them; None: every step is launched operation by operation.
    """

    #: (..., 1, 1) position of the first token of the answer, known once the prompt has run.
    following: Tensor

    def __init__(self, adapter: ModelParts, room: int, graphs: Graphs | None = None) -> None:
        self.device = adapter.device
        self._decoder = adapter.decoder
        self._configs = attention_configs(self._decoder)
        text = self._decoder.config
        self._groups = text.num_attention_heads // text.num_key_value_heads
        self._text = TextForward.of(adapter)
        self._dtype = adapter.model.get_input_embeddings().weight.dtype
        self._graphs = graphs
        self._steps: FixedSteps | None = None
        #: Keys and values of the prompt and of the tokens run after it.
        self.cache = IndexedCache(len(self._decoder.layers), room)

    def folding(self) -> AbstractContextManager[bool]:
        """Return `fold_heads` for this model; opened around several calls of `run`, it is not opened in each."""
        return fold_heads(self._configs)

    def run(self, ids: Tensor, places: Sequence[int], visible: Tensor | None = None) -> Tensor:
        """Run new tokens and return the logits (t, V) after each, on the input device.

        Args:
            ids: (t,) after the contents of the cache.
            places: of each in the answer.
            visible: (t, s) which of the last s keys, their own included, each sees; None: all earlier ones and itself.

        Raises:
            UserError: tokens that branch, on attention that takes no mask, or in layers of different lengths.
        """
        with self.folding() as folds_heads:
            lengths, count = self.cache.lengths, len(places)
            keys = max(lengths) + count
            ragged = min(lengths) < max(lengths)
            mask = None
            if (
                self._graphs is not None
                and count == 1
                and visible is None
                and folds_heads
                and not ragged
            ):
                if self._steps is None:
                    shape = self._groups, self._dtype
                    self._steps = FixedSteps(
                        self._text, self.cache, self.following, shape, self._graphs
                    )
                return self._steps.run(ids, places[0])
            if visible is not None:
                name = self._decoder.config._attn_implementation
                if not folds_heads and (name != "eager" or ragged):
                    # One explicit mask cannot serve all layers.
                    raise UserError(
                        f"model.attention={name!r} cannot verify a drafted tree"
                        f"{' over layers of different lengths' if ragged else ''}; valid: sdpa"
                    )
                groups = self._groups if folds_heads else 1
                mask = window_mask(visible.to(self.device), keys, groups, self._dtype)
            elif count > 1 and folds_heads:
                mask = chain_mask(count, keys, self._groups, self._dtype, self.device)
            elif count > 1 and ragged:
                # The single mask that the stack builds does not fit all layers.
                token_logits = [
                    self._forward(ids[n : n + 1], [places[n]], None) for n in range(count)
                ]
                return torch.cat(token_logits)
            return self._forward(ids, places, mask)

    def _forward(self, ids: Tensor, places: Sequence[int], mask: Tensor | None) -> Tensor:
        first, count = places[0], len(places)
        if list(places) == list(range(first, first + count)):
            steps = torch.arange(first, first + count, device=ids.device)
        elif len(set(places)) == 1:
            steps = torch.full((count,), first, device=ids.device)
        else:
            steps = torch.tensor(places, device=ids.device)
        logits = self._text(ids[None], self.following + steps, mask, self.cache)[0]
        # A model spread over devices ends on the last one; callers read on the first.
        return logits.to(self.device)


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
        return cast("Tensor", self.head(hidden))

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


class FixedSteps:
    """The steps of one answer, each recorded when its number of slots is first needed.

    A step is one token through the text stack: a function of tensors with constant shapes and operations.

    Args:
        text: the stack.
        cache: contains its prompt; all layers hold the same number of tokens.
        following: (..., 1, 1) position of the answer's first token.
        shape: query heads that share a key head, and dtype of the queries.
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
        keys = min(-(-(slot + 1) // BUCKET) * BUCKET, self._capacity)
        if keys not in self._replays:
            inputs = self._ids, self._slot, self._place
            self._replays[keys] = self._graphs.capture(partial(self._step, keys), inputs)
        logits = self._replays[keys]()
        self._cache.grow()
        return logits.clone()  # the next replay overwrites it

    def _step(self, keys: int, ids: Tensor, slot: Tensor, place: Tensor) -> Tensor:
        """Return the logits (1, V) after a token; it attends to so many slots.

        Args:
            keys: slots, with zeros in those after the tokens held.
            ids: (1, 1).
            slot: (1,) of the cache, where the token is written.
            place: (1,) of the token in the answer.
        """
        mask = step_mask(slot, keys, *self._shape)
        into = FixedCache(self._cache, slot, keys)
        return self._text(ids, self._following + place, mask, into)[0]


#: Runs before a recording: libraries choose their kernels and allocate their workspaces in the first ones.
WARMING = 3

Step = Callable[..., Tensor]


class Graphs(Protocol):
    """Records functions of tensors."""

    def capture(self, function: Step, inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        """Return a function that runs `function` again on the current contents of `inputs`, and returns its result.

        The result is one tensor, overwritten by every further run. The function may run several times meanwhile, so
        running it twice must have the same effect as once.
        """


class CudaGraphs:
    """Records on one GPU, in a separate stream; one object for all answers of a model.

    It captures in `thread_local` mode and waits only for streams of this thread, so that another thread can run the
    other side meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        # One stream for all recordings: a library keeps a workspace of many MB for each stream. And one pool, or every
        # answer would keep its intermediate results reserved, although they are never needed at the same time.
        self._stream: Any = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._latest: Any = None

    def capture(self, function: Step, inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        """Record the function. Cost: `WARMING` + 1 launches of it, and the memory of its intermediate results."""
        current = torch.cuda.current_stream(self._stream.device)
        graph: Any = torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        # Not torch.cuda.graph: it synchronises the device, on which another thread may be capturing.
        with torch.cuda.stream(self._stream):
            for _ in range(WARMING):
                function(*inputs)
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = function(*inputs)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        self._latest = graph  # a pool is freed with the last graph recorded into it

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def graphs_for(adapter: ModelParts, requested: bool | Auto) -> Graphs | None:
    """Return the recorder of a loaded model's steps; None if steps are not recorded.

    Args:
        adapter: the model.
        requested: `engine.graphs`; `auto`: record where possible.

    Raises:
        Refused: requested and not possible.
    """
    if requested is False:
        return None
    try:
        check_recordable(adapter.spec)
        devices = {parameter.device for parameter in adapter.model.parameters()}
        rotary = getattr(adapter.decoder, "rotary_emb", None)
        settings = {"engine": {"graphs": True}, "model": adapter.spec}
        refuse("graphs of a loaded model", settings, n_devices=len(devices), rotary=rotary)
    except Refused:
        if requested is True:
            raise
        return None
    return CudaGraphs(adapter.device)


@torch.inference_mode()
def text_only_prefill(
    adapter: ModelParts, inputs: Mapping[str, Any], cache: Cache
) -> tuple[Tensor, Tensor]:
    """Run a prompt without its images: no placeholders, newlines or separators, and positions that count from 0.

    Args:
        adapter: the model; its tower does not run.
        inputs: one encoded chat.
        cache: empty.

    Returns:
        logits: (V,) after the last token of the prompt.
        next: (..., 1) position of the next token, on as many axes as the decoder takes.

    Raises:
        ValueError: several chats.
    """
    words = adapter.layout(inputs).words
    if words.shape[0] != 1:
        raise ValueError(f"{words.shape[0]} prompts; a prefill by itself takes one")
    ids = inputs["input_ids"][:, words[0].to(inputs["input_ids"].device)]
    return prefill_words(adapter, ids, cache)


def prefill_words(adapter: ModelParts, ids: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
    """Run the words `ids` (1, L) at positions from 0 and return the same as `text_only_prefill`, on their device."""
    axes = adapter.facts.rotary_axes
    positions = torch.arange(ids.shape[1], device=ids.device).expand(1, -1)
    if axes > 1:
        positions = positions.expand(axes, 1, -1)
    hidden = adapter.decoder(
        inputs_embeds=adapter.model.get_input_embeddings()(ids),
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    logits = adapter.model.get_output_embeddings()(hidden[0, -1])
    return logits.to(ids.device), positions[..., -1:] + 1
