"""Signals of a denoising step: `decider_attention`, `layer_normed`.

The attention is that of the named layer, or of a `block` site's layer, which has just run; the states are those that
entered it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from espalier.harness.engine.attention_probe import Watcher, attention_rows
from espalier.harness.engine.layout import Stage
from espalier.harness.engine.signals.decoder_states import ReachedStates
from espalier.harness.engine.signals.producer import DecoderSignal, ViewRequest
from espalier.methods.base import MethodError

#: Key of a step's inputs with the mask (B, G) of the answer's tokens, the last ones, that are deciders.
DECIDERS = "deciders"


def answer_length(inputs: Mapping[str, Any]) -> int:
    """Return the number of answer positions after the prompt: 0 outside denoising steps."""
    deciders: Tensor | None = inputs.get(DECIDERS)
    return 0 if deciders is None else deciders.shape[1]


class DeciderAttention(DecoderSignal):
    """Attention from the tokens unveiled in the previous step, summed."""

    _deciders: Tensor | None = None

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Store the deciders."""
        super().begin(inputs)
        self._deciders = inputs.get(DECIDERS)

    def watchers(self) -> Sequence[tuple[nn.Module, Watcher]]:
        """Return the attention of the site's layer."""
        index = self.site.layer if self.need.layer is None else self.need.layer
        self._check_layer(index)
        return [(self.context.parts.decoder.layers[index].self_attn, self._watch)]

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Compute the rows of the answer's tokens, and sum those of the deciders."""
        if self._deciders is None:
            raise MethodError("signal 'decider_attention' is available in denoising steps only")
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
    """Visual tokens after the layer's input norm."""

    def reach(self, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Take the visual tokens and normalise them."""
        layer = self.context.parts.decoder.layers[self.site.layer]
        self._captured = layer.input_layernorm(self.per_token(stage, hidden))

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n, D)."""
        return request.select(self.captured)
