"""Attention rollout of each word over the decoder layers since the last site: `text_rollout`.

Captured layer by layer in the prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from espalier.harness.engine.attention_probe import Watcher
from espalier.harness.engine.rollout import LayerHeads, rollout
from espalier.harness.engine.signals.producer import DecoderSignal, ViewRequest
from espalier.harness.engine.visibility import CAUSAL, Visibility


class TextRollout(DecoderSignal):
    """Keeps queries and keys of the layers in between, and computes the rollout after the last of them."""

    def watchers(self) -> Sequence[tuple[nn.Module, Watcher]]:
        """Return the layers since the last site that takes effect between layers."""
        sites = self.context.sites
        starts = (site.shortens or 0 for site in sites)
        earlier = [start for start in starts if start < self.site.layer]
        self._window = range(max(earlier, default=0), self.site.layer)
        self._heads: list[LayerHeads] = []
        layers = self.context.parts.decoder.layers
        return [(layers[index].self_attn, partial(self._add, index)) for index in self._window]

    def _add(self, index: int, query: Tensor, key: Tensor, scaling: float) -> None:
        stage = self.context.stage()
        if stage is None:
            return
        stage.move(query.device)
        if index == self._window[0]:
            self._heads.clear()
        self._heads.append((query, key, scaling))
        if index == self._window[-1]:
            visibility = self.context.visibility
            rows = rollout_of_words(self._heads, stage.valid, stage.words, visibility)
            self._captured = self.per_token(stage, rows.transpose(1, 2))
            self._heads.clear()

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, T, n)."""
        return request.select(self.captured).transpose(1, 2)


def rollout_of_words(
    layers: Sequence[LayerHeads], valid: Tensor, words: Tensor, visibility: Visibility = CAUSAL
) -> Tensor:
    """Return (B, T, S): the rollout of decoder layers from each word's slot (B, T), 0 where the slot is -1.

    Args:
        layers: of the decoder, first to last, all with the same slots.
        valid: (B, S) slots that may be attended to.
        words: (B, T) slots.
        visibility: attention visibility.
    """
    query = layers[0][0]
    slot = torch.arange(query.shape[2], device=query.device)
    start = (words.unsqueeze(2) == slot).to(torch.promote_types(query.dtype, torch.float32))

    def visible(block_slots: slice) -> Tensor:
        return (visibility.sees(slot[block_slots], len(slot)) & valid.unsqueeze(1))[:, None]

    return rollout(layers, start, visible)
