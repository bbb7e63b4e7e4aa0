"""Attention of some queries to each key, largest over heads: `visual_received_max`, `text_received_max` and `_peak`.

Captured in the prefill, in the layer before the site, and summed block by block: full maps are never stored.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from espalier.harness.engine.attention_probe import query_rows
from espalier.harness.engine.layout import Layout, Stage
from espalier.harness.engine.signals.producer import DecoderSignal, ViewRequest
from espalier.harness.engine.visibility import CAUSAL, Visibility


class VisualReceivedMax(DecoderSignal):
    """Attention from the remaining visual tokens."""

    #: Whether the largest over queries counts, and not their mean.
    peak = False

    def query_slots(self, stage: Stage) -> Tensor:
        """Return the (B, R) slots of the queries, -1 where a row has fewer."""
        counts = torch.tensor(stage.counts, device=stage.slots.device).unsqueeze(1)
        place = torch.arange(stage.slots.shape[1], device=stage.slots.device)
        return torch.where(place < counts, stage.slots, -1)

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Compute the rows of these queries."""
        slots, visibility = self.query_slots(stage), self.context.visibility
        received = received_max(
            query, key, scaling, stage.valid, slots, visibility=visibility, peak=self.peak
        )
        return self.per_token(stage, received)

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n)."""
        return request.select(self.captured)


class TextReceivedMax(VisualReceivedMax):
    """Attention from the words after the image."""

    _answer_length: Tensor

    def enter(self, layout: Layout, hidden: Tensor) -> None:
        """Find these words while no visual token has been dropped."""
        super().enter(layout, hidden)
        self._answer_length = words_after_image(layout)

    def query_slots(self, stage: Stage) -> Tensor:
        """Return the (B, R) slots of the queries, -1 where a row has fewer."""
        return torch.where(self._answer_length.to(stage.words.device), stage.words, -1)


class TextReceivedPeak(TextReceivedMax):
    """The largest attention from a word after the image."""

    peak = True


def words_after_image(layout: Layout) -> Tensor:
    """Return (B, T): True for words after the last visual token of their row, dropped or not."""
    # A batch may have no visual tokens.
    last = pad(layout.visual, (1, 0), value=-1).amax(dim=1, keepdim=True)
    return layout.words > last


def received_max(
    query: Tensor,
    key: Tensor,
    scaling: float,
    valid: Tensor,
    slots: Tensor,
    block: int = 256,
    visibility: Visibility = CAUSAL,
    peak: bool = False,
) -> Tensor:
    """Return (B, S): the largest attention over heads that each key receives, mean over the given queries or `peak`.

    Arguments and cost are those of `query_rows`; a row without queries receives 0. FitPrune (arXiv 2409.10197).
    """
    accumulator = torch.promote_types(query.dtype, torch.float32)
    total = torch.zeros(valid.shape, dtype=accumulator, device=key.device)
    for weights, real in query_rows(query, key, scaling, valid, slots, block, visibility):
        largest = weights.amax(dim=1) * real
        total = torch.maximum(total, largest.amax(dim=1)) if peak else total + largest.sum(dim=1)
    return total if peak else total / (slots >= 0).sum(dim=1, keepdim=True).clamp(min=1)
