"""Queries and keys of a decoder layer, rotary positions applied: `visual_keys`, `text_queries`, `text_keys`.

Captured in the prefill, in the layer before the site.
"""

from __future__ import annotations

from torch import Tensor

from espalier.harness.engine.layout import Stage
from espalier.harness.engine.signals.producer import DecoderSignal, ViewRequest, word_states


class VisualKeys(DecoderSignal):
    """Keys of the visual tokens."""

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Keep (B, N, H_kv, Dh)."""
        return self.per_token(stage, key.transpose(1, 2))

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, H_kv, n, Dh)."""
        return request.select(self.captured).transpose(1, 2)


class TextKeys(DecoderSignal):
    """Keys of the words."""

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Keep (B, H_kv, T, Dh)."""
        return word_states(key, stage.words)

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, H_kv, T, Dh)."""
        return self.captured[request.rows]


class TextQueries(TextKeys):
    """Queries of the words."""

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Keep (B, H, T, Dh)."""
        return word_states(query, stage.words)
