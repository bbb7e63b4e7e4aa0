"""Attention of each word to each visual token: `text_attention`. Captured in the prefill, before the site."""

from __future__ import annotations

from torch import Tensor

from espalier.harness.engine.attention_probe import word_rows
from espalier.harness.engine.layout import Stage
from espalier.harness.engine.signals.producer import DecoderSignal, ViewRequest


class TextAttention(DecoderSignal):
    """Attention rows of all words, mean over heads."""

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Compute the words' rows."""
        visibility = self.context.visibility
        rows = word_rows(query, key, scaling, stage.valid, stage.words, visibility=visibility)
        return self.per_token(stage, rows.transpose(1, 2))

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, T, n)."""
        return request.select(self.captured).transpose(1, 2)
