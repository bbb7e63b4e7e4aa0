"""Signals of a denoising step: `decider_attention`, `masked_attention`, `first_kept`.

The deciders' attention is that of the named layer, or of a `block` site's layer, which has just run. The other two are
of the first step, and 0 in that step itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from espalier.harness.engine.attention_probe import Watcher, attention_rows
from espalier.harness.engine.layout import Layout, Stage
from espalier.harness.engine.signals.producer import (
    DECIDERS,
    FIRST_KEPT,
    STEP,
    DecoderSignal,
    Producer,
    ViewRequest,
    answer_length,
)
from espalier.harness.engine.signals.table import signal
from espalier.methods.base import MethodError


class AnswerSignal(DecoderSignal):
    """Base of signals from the attention that the answer's tokens pay."""

    def answer_rows(
        self, stage: Stage, query: Tensor, key: Tensor, scaling: float, count: int
    ) -> Tensor:
        """Return the attention (B, G, S) of the answer's `count` tokens, mean over heads."""
        first = query.shape[2] - count
        slots = torch.arange(first, query.shape[2], device=query.device)
        sees = self.context.stack_visibility.sees(slots, key.shape[2])
        visible = (sees & stage.valid.unsqueeze(1)).unsqueeze(1)
        return attention_rows(query[:, :, first:], key, scaling, visible)


@signal(
    "decider_attention",
    "(B, N) attention that the answer's tokens unveiled in the step before pay each visual token in "
    "the layer named, or in a `block` site's own, mean over heads, sum over those tokens, fp32; in "
    "denoising steps",
)
class DeciderAttention(AnswerSignal):
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
        rows = self.answer_rows(stage, query, key, scaling, deciders.shape[1])
        return self.per_token(stage, (rows * deciders.unsqueeze(2)).sum(1))


@signal(
    "masked_attention",
    "(B, N) attention that the answer's tokens that the first denoising step left masked paid each "
    "visual token in that step, mean over those tokens, layers and heads, fp32; 0 in the first step",
)
class MaskedAttention(AnswerSignal):
    """Attention in the first step from the tokens that it leaves masked, mean over them and all layers."""

    _count = 0
    _is_first = False
    #: (B, N, G) attention of each of the answer's tokens, sum over the layers that have run.
    _rows: Tensor | None = None

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Drop the former answer's values before a first step, and average before the second one."""
        self._is_first, self._count = inputs.get(STEP) == 0, answer_length(inputs)
        if not inputs.get(STEP):
            self._rows = self._captured = None
        elif self._rows is not None and self._captured is None:
            masked = ~inputs[DECIDERS].to(self._rows.device).unsqueeze(1)
            shares = masked / masked.sum(2, keepdim=True).clamp(min=1)
            self._captured = (self._rows * shares).sum(2) / len(self.context.parts.decoder.layers)

    def enter(self, layout: Layout, hidden: Tensor) -> None:
        """Begin the sum, 0 for every token."""
        super().enter(layout, hidden)
        if self._is_first:
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            self._rows = hidden.new_zeros(*layout.visual.shape, self._count, dtype=dtype)

    def watchers(self) -> Sequence[tuple[nn.Module, Watcher]]:
        """Return the attention of every layer."""
        return [(layer.self_attn, self._watch) for layer in self.context.parts.decoder.layers]

    def _watch(self, query: Tensor, key: Tensor, scaling: float) -> None:
        stage = self.context.stage()
        if stage is not None and self._is_first:
            assert self._rows is not None  # since `enter`
            rows = self.answer_rows(
                stage.move(query.device), query, key, scaling, self._count
            ).transpose(1, 2)
            self._rows += self.per_token(stage.move(query.device), rows).to(self._rows.device)

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n)."""
        if self._rows is None:
            raise MethodError("signal 'masked_attention' is available after a first denoising step")
        return request.select(self._rows[..., 0] if self._is_first else self.captured)


@signal(
    "first_kept",
    "(B, N) 1 for each visual token that the first denoising step kept, fp32; 0 in the first step",
)
class FirstKept(Producer):
    """Which visual tokens the first step kept."""

    _kept: Sequence[Tensor] = ()

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Store their indices."""
        self._kept = inputs.get(FIRST_KEPT, ())

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n)."""
        table = torch.zeros_like(request.layout.visual, dtype=torch.float32)
        for row, kept in zip(table, self._kept, strict=False):
            row.index_fill_(0, kept.to(row.device), 1.0)
        return request.select(table)
