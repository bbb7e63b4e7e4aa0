"""A cache of random content for two generation loops, for `lab.bench.decode_bench`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from espalier.harness.engine.decode_steps import DecodeSteps
from espalier.harness.engine.generation_loop import run_loop
from espalier.harness.engine.kv_cache import IndexedCache, answer_cache
from espalier.harness.engine.layout import Stage
from espalier.harness.engine.model_parts import ModelParts
from lab.bench.step_copies import written


class Filled:
    """A batch with its prompt, except the last token, already in the cache; of several rows the first is padded.

    Args:
        adapter: the model.
        length: tokens in the cache, padding included.
        rows: rows of the batch.
    """

    def __init__(self, adapter: ModelParts, length: int, rows: int) -> None:
        self._adapter, self.length, self.rows = adapter, length, rows
        self.device, facts = adapter.device, adapter.facts.text
        self._generator = torch.Generator(self.device).manual_seed(length)
        dtype = adapter.model.get_input_embeddings().weight.dtype
        shape = (rows, facts.kv_heads, length, facts.head_dim)
        self._content = [
            tuple(
                torch.randn(shape, generator=self._generator, device=self.device).to(dtype)
                for _ in range(2)
            )
            for _ in range(facts.layers)
        ]
        self.valid = torch.ones(rows, length + 1, dtype=torch.bool, device=self.device)
        if rows > 1:
            self.valid[0, : length // 3] = False
        self._ids = torch.full((rows, length + 1), 7, device=self.device)
        #: The caches that the next answer continues.
        self._caches: dict[str, Cache] = {}
        self.refill()

    @property
    def layer_bytes(self) -> int:
        """Bytes of the keys of one layer."""
        keys = self._content[0][0]
        return keys.numel() * keys.element_size()

    def refill(self) -> None:
        """Recreate the caches after answers have written to them."""
        self._caches = {"own": DynamicCache(), "indexed": answer_cache(self._adapter.decoder)}
        for cache in self._caches.values():
            for layer, (keys, values) in enumerate(self._content):
                cache.update(keys.clone(), values.clone(), layer)

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def library(self, tokens: int, indexed: bool) -> None:
        """Generate an answer with the library's loop, with its own cache or the engine's."""
        self._say(tokens, self._caches["indexed" if indexed else "own"])

    def loop(self, tokens: int) -> None:
        """Generate an answer with the engine's loop."""
        cache = self._caches["indexed"]
        assert isinstance(cache, IndexedCache)
        layout = _Behind(self._adapter.decoder, self.valid)
        handle = self._adapter.decoder.register_forward_pre_hook(layout.complete, with_kwargs=True)
        try:
            self._say(tokens, cache, custom_generate=partial(run_loop, self._adapter, layout))
        finally:
            handle.remove()

    def _say(self, tokens: int, cache: Cache, **options: Any) -> None:
        self._adapter.model.generate(
            input_ids=self._ids,
            attention_mask=self.valid.long(),
            past_key_values=cache,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            **options,
        )

    def written(self, run: Callable[[], None]) -> int:
        """Return the bytes of the largest tensor that one operation of a late step writes."""
        self.refill()
        with written(self._adapter.decoder) as writes:
            run()
        return writes.steps[-2][0]


class _Behind:
    """Replacement for a finished prefill: the next position, and the masks of the steps."""

    def __init__(self, decoder: Any, valid: Tensor) -> None:
        none, rows = valid.new_zeros(len(valid), 0, dtype=torch.long), len(valid)
        stage = Stage(0, valid, not bool(valid.all()), none, (0,) * rows, none, none)
        self._steps = DecodeSteps([stage], decoder.config, emulate=False)
        self.following: Tensor
        self._first = True

    def complete(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Leave the first call to the library, and complete the others, as a forward pass does."""
        if self._first:
            self._first = False
            self.following = kwargs["position_ids"][..., -1:] + 1
            return None
        return args, self._steps.arguments(kwargs)

    def check_finite(self, lengths: Any) -> None:
        """Skip the check, because the content is random."""
