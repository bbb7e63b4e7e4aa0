"""Attention of a decoder layer to each visual token: `last_attention`, `mean_attention`.

Captured in the prefill, in the layer before the site.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from espalier.harness.engine.attention_probe import last_row, received_mean
from espalier.harness.engine.layout import Stage
from espalier.harness.engine.signals.deciders import answer_length
from espalier.harness.engine.signals.producer import DecoderSignal, ViewRequest


class LastAttention(DecoderSignal):
    """Attention from the prompt's last token, which in a denoising step precedes the answer."""

    _answer_length = 0

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Store the length of the answer after the prompt."""
        super().begin(inputs)
        self._answer_length = answer_length(inputs)

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Compute one row."""
        prompt = query[:, :, : query.shape[2] - self._answer_length]
        return self.per_token(stage, last_row(prompt, key, scaling, stage.valid))

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n)."""
        return request.select(self.captured)


class MeanAttention(DecoderSignal):
    """Mean attention from all queries that see the token."""

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Compute all rows, block by block."""
        visibility = self.context.visibility
        received = received_mean(query, key, scaling, stage.valid, visibility=visibility)
        return self.per_token(stage, received)

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n)."""
        return request.select(self.captured)
