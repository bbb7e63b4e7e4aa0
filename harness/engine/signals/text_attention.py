"""What each word pays each visual token: `text_attention`. Captured in the prefill, in the layer before the site."""

from __future__ import annotations

from torch import Tensor

from espalier.harness.engine.attention_probe import word_rows
from espalier.harness.engine.layout import Stage
from espalier.harness.engine.signals.producer import Asked, InDecoder


class TextAttention(InDecoder):
    """Rows of all words, mean over heads."""

    def look(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Compute the words' rows."""
        seen = self.context.visibility
        rows = word_rows(query, key, scaling, stage.valid, stage.words, visibility=seen)
        return self.per_token(stage, rows.transpose(1, 2))

    def hand_over(self, asked: Asked) -> Tensor:
        """Return (b, T, n)."""
        return asked.chosen(self.found).transpose(1, 2)
