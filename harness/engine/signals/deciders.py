"""What a denoising step reads: `decider_attention`, `layer_normed`.

The attention is that of the layer named, or of a `block` site's own, which has just run; the states are those that
entered it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from espalier.harness.engine.attention_probe import Watcher, attention_rows
from espalier.harness.engine.layout import Stage
from espalier.harness.engine.signals.producer import DecoderSignal, ViewRequest
from espalier.harness.engine.signals.states import ReachedStates
from espalier.methods.base import MethodError

#: Under this name the inputs of a step say which of the answer's tokens, its last ones, decide: booleans (B, G).
DECIDERS = "deciders"


def answer_length(inputs: Mapping[str, Any]) -> int:
    """Return how many places of an answer stand behind the prompt: none outside denoising steps."""
    deciders: Tensor | None = inputs.get(DECIDERS)
    return 0 if deciders is None else deciders.shape[1]


class DeciderAttention(DecoderSignal):
    """From the tokens unveiled in the step before, summed up."""

    _deciders: Tensor | None = None

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Note who decides."""
        super().begin(inputs)
        self._deciders = inputs.get(DECIDERS)

    def watchers(self) -> Sequence[tuple[nn.Module, Watcher]]:
        """Return the attention of the site's own layer."""
        index = self.site.layer if self.need.layer is None else self.need.layer
        return [(self.context.parts.decoder.layers[index].self_attn, self._watch)]

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Compute the rows of the answer's tokens, and add up those that decide."""
        if self._deciders is None:
            raise MethodError("decider_attention is there in denoising steps alone")
        deciders = self._deciders.to(query.device)
        first = query.shape[2] - deciders.shape[1]
        slots = torch.arange(first, query.shape[2], device=query.device)
        sees = self.context.visibility.sees(slots, key.shape[2])
        visible = (sees & stage.valid.unsqueeze(1)).unsqueeze(1)
        rows = attention_rows(query[:, :, first:], key, scaling, visible)
        return self.per_token(stage, (rows * deciders.unsqueeze(2)).sum(1))

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n)."""
        return request.select(self.captured)


class LayerNormed(ReachedStates):
    """Visual tokens after the layer's own input norm."""

    def reach(self, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Take the visual tokens and norm them."""
        layer = self.context.parts.decoder.layers[self.site.layer]
        self._captured = layer.input_layernorm(self.per_token(stage, hidden))

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n, D)."""
        return request.select(self.captured)
