"""Sparse-to-dense drafting: the target's own weights on a part of its cache (STD, arXiv 2505.19155)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from espalier.harness.decoding.speculative.cached_model import CachedModel, common_length
from espalier.harness.decoding.speculative.drafts import Draft
from espalier.harness.decoding.speculative.samplers import Sampler
from espalier.harness.engine.text.kv_cache import IndexedCache


class SparseDrafter:
    """Drafts with the target on a second cache: per layer all words and only the kept visual tokens, where they stood.

    Verified tokens have keys and values in the target's cache already; they are copied from there, and what the draft
    computed for them itself is dropped. The target must not run meanwhile, for both share its weights and its cache.

    Args:
        target: the verifying side.
        kept: (layers, K) visual tokens that each layer of the draft sees, ascending.
        visual: (N,) place of each visual token in the prompt.
        sampler: how its logits become tokens; None: as the target's. One that samples needs random numbers.

    Raises:
        ValueError: not as many rows as layers.
    """

    def __init__(
        self, target: CachedModel, kept: Tensor, visual: Tensor, sampler: Sampler | None = None
    ) -> None:
        layers = len(target.cache.lengths)
        if kept.dim() != 2 or kept.shape[0] != layers:
            raise ValueError(
                f"kept visual tokens {tuple(kept.shape)} are not one row for each of {layers} layers"
            )
        self._target = target
        self._kept, self._visual = kept, visual
        speaks = sampler or target.sampler
        self._side = CachedModel(target.adapter, speaks, target.room, self._prefill, target.graphs)
        self._dense = 0

    @property
    def cache(self) -> IndexedCache:
        """Keys and values that the draft attends to."""
        return self._side.cache

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        """Return the next `count` tokens; only what the target's cache does not hold is fed."""
        target, side = self._target, self._side
        target.start()
        side.start()
        side.cut(min(self._dense, common_length(side.fed, tokens)))
        # The last token's row comes from the draft's own pass, so the token itself is never only copied.
        self._dense = common_length(target.fed, tokens[:-1])
        side.adopt(tokens[: self._dense], target)
        return side.draft(tokens, count)

    def _prefill(self, cache: IndexedCache) -> tuple[Tensor, Tensor]:
        """Gather the kept part of the prompt; the target has run it."""
        target = self._target
        shape = len(self._kept), target.prompt_lengths[0]
        alive = torch.ones(shape, dtype=torch.bool, device=self._kept.device)
        visual = self._visual.to(alive.device)
        alive[:, visual] = False
        alive.scatter_(1, visual[self._kept], True)
        slots = alive.nonzero()[:, 1].view(len(alive), -1)
        cache.gather(target.cache, slots)
        return target.first, target.stack.following
