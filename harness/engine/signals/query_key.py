"""Queries and keys of a decoder layer, rotary positions applied: `visual_keys`, `text_queries`, `text_keys`.

Captured in the prefill, in the layer before the site.
"""

from __future__ import annotations

from torch import Tensor

from espalier.harness.engine.layout import Stage
from espalier.harness.engine.signals.producer import Asked, InDecoder, of_words


class VisualKeys(InDecoder):
    """Keys of the visual tokens."""

    def look(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Keep (B, N, H_kv, Dh)."""
        return self.per_token(stage, key.transpose(1, 2))

    def hand_over(self, asked: Asked) -> Tensor:
        """Return (b, H_kv, n, Dh)."""
        return asked.chosen(self.found).transpose(1, 2)


class TextKeys(InDecoder):
    """Keys of the words."""

    def look(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Keep (B, H_kv, T, Dh)."""
        return of_words(key, stage.words)

    def hand_over(self, asked: Asked) -> Tensor:
        """Return (b, H_kv, T, Dh)."""
        return self.found[asked.rows]


class TextQueries(TextKeys):
    """Queries of the words."""

    def look(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Keep (B, H, T, Dh)."""
        return of_words(query, stage.words)
