"""Sparse-to-dense drafting: the target's own weights on a part of its cache (STD, arXiv 2505.19155)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from espalier.harness.decoding.speculative.cached_model import CachedModel, common_length
from espalier.harness.decoding.speculative.drafts import Draft
from espalier.harness.decoding.speculative.samplers import TokenSampler
from espalier.harness.engine.kv_cache import IndexedCache


class SparseDrafter:
    """Drafts with the target on a second cache: per layer all words and the kept visual tokens, at their positions.

    Keys and values of verified tokens are copied from the target's cache, and the draft's own are dropped. The target
    must not run meanwhile, since both share its weights and its cache.

    Args:
        target: the verifying side.
        kept: (layers, K) visual tokens that each layer of the draft sees, ascending.
        visual: (N,) position of each visual token in the prompt.
        sampler: turns its logits into tokens; None: the target's. A sampling one needs random numbers.

    Raises:
        ValueError: `kept` does not have one row per layer.
    """

    def __init__(
        self, target: CachedModel, kept: Tensor, visual: Tensor, sampler: TokenSampler | None = None
    ) -> None:
        layers = len(target.cache.lengths)
        if kept.dim() != 2 or kept.shape[0] != layers:
            raise ValueError(
                f"kept visual tokens {tuple(kept.shape)} are not one row for each of {layers} layers"
            )
        self._target = target
        self._kept, self._visual = kept, visual
        draft_sampler = sampler or target.sampler
        self._side = CachedModel(
            target.adapter, draft_sampler, target.room, self._prefill, target.graphs
        )
        self._dense = 0

    @property
    def cache(self) -> IndexedCache:
        """Keys and values that the draft attends to."""
        return self._side.cache

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        """Return the next `count` tokens; only tokens that the target's cache lacks are fed."""
        target, side = self._target, self._side
        target.start()
        side.start()
        side.cut(min(self._dense, common_length(side.fed, tokens)))
        # The last token's row comes from the draft's own pass, so that token is always fed, not copied.
        self._dense = common_length(target.fed, tokens[:-1])
        side.adopt(tokens[: self._dense], target)
        return side.draft(tokens, count)

    def _prefill(self, cache: IndexedCache) -> tuple[Tensor, Tensor]:
        """Gather the kept part of the prompt, which the target has run."""
        target = self._target
        shape = len(self._kept), target.prompt_lengths[0]
        visible = torch.ones(shape, dtype=torch.bool, device=self._kept.device)
        visual = self._visual.to(visible.device)
        visible[:, visual] = False
        visible.scatter_(1, visual[self._kept], True)
        slots = visible.nonzero()[:, 1].view(len(visible), -1)
        cache.gather(target.cache, slots)
        return target.first, target.stack.following
