"""What a decoder layer pays each visual token: `last_attention`, `mean_attention`.

Captured in the prefill, in the layer before the site.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from espalier.harness.engine.attention_probe import last_row, received_mean
from espalier.harness.engine.layout import Stage
from espalier.harness.engine.signals.deciders import places_behind
from espalier.harness.engine.signals.producer import Asked, InDecoder


class LastAttention(InDecoder):
    """From the prompt's last token, behind which a denoising step has the answer."""

    _behind = 0

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Note where the prompt ends."""
        super().begin(inputs)
        self._behind = places_behind(inputs)

    def look(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Compute one row."""
        prompt = query[:, :, : query.shape[2] - self._behind]
        return self.per_token(stage, last_row(prompt, key, scaling, stage.valid))

    def hand_over(self, asked: Asked) -> Tensor:
        """Return (b, n)."""
        return asked.chosen(self.found)


class MeanAttention(InDecoder):
    """From all queries that see the token."""

    def look(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Compute all rows, block by block."""
        seen = self.context.visibility
        paid = received_mean(query, key, scaling, stage.valid, visibility=seen)
        return self.per_token(stage, paid)

    def hand_over(self, asked: Asked) -> Tensor:
        """Return (b, n)."""
        return asked.chosen(self.found)
