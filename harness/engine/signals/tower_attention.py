"""Signals of the tower, by unit: `cls_attention`, `cls_logits`, `tower_received`, `tower_keys`, `tower_states`.

Attention and keys come from the layer that the projector reads, or the named one; if a learned query pools the tower's
output, from the pooling head. `tower_states` is the mean of the hidden states over the tower's last third. Captured at
every call of the tower; units are blended into tokens as the model does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from espalier.harness.cost.clock import Clock
from espalier.harness.engine.attention_probe import (
    Watcher,
    attention_rows,
    mean_logits,
    received_unmasked,
)
from espalier.harness.engine.layout import mix, take
from espalier.harness.engine.model_parts import ModelParts
from espalier.harness.engine.signals.producer import Context, Producer, ViewRequest
from espalier.harness.engine.signals.table import signal
from espalier.methods.base import Need, Site


class UnitSignal(Producer):
    """Base of the tower's signals for each unit of the projector; the same at every site."""

    shared = True

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n) or (b, n, D)."""
        units = self.units() if self.kept_units is None else self.kept_units
        units, layout = units.to(request.origin.device), request.layout
        source = take(layout.source[request.rows], request.origin, -2)
        shares = layout.share
        share = None if shares is None else take(shares[request.rows], request.origin, -2)
        if units.dim() == 1:
            return mix(units.unsqueeze(-1), source, share).squeeze(-1)
        return mix(units, source, share)


class TowerAttention(UnitSignal):
    """Reads queries and keys of one attention module of the tower."""

    _parts: Sequence[Tensor] = ()

    def watchers(self) -> Sequence[tuple[nn.Module, Watcher]]:
        """Return the layer's attention, or that of the pooling head."""
        parts = self.context.parts
        if parts.facts.class_attention == "probe" and "cls" in self.need.signal:
            return [(parts.pooling_attention(), self._watch)]
        return [(parts.tower_attention(tower_layer(parts, self.need)), self._watch)]

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Drop the last pass's images."""
        self._parts = []

    def _watch(self, query: Tensor, key: Tensor, scaling: float) -> None:
        if self.need.signal.startswith("wide"):
            query, key = _merge_heads(query), _merge_heads(key)
            scaling = query.shape[-1] ** -0.5
        self._parts = [*self._parts, self.context.parts.to_units(self.read(query, key, scaling))]

    def units(self) -> Tensor:
        """Return the values of all calls of the tower."""
        return torch.cat(list(self._parts))

    def read(self, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Return (P, N) or (P, N, D) from queries and keys (P, H, S, Dh) of one call."""
        raise NotImplementedError


@signal(
    "tower_keys",
    "(B, N, Dk) keys of the tower layer whose output the projector reads, mean over heads",
    units=True,
)
@signal(
    "wide_tower_keys",
    "(B, N, H Dk) `tower_keys` of all heads side by side",
    units=True,
)
class TowerKeys(TowerAttention):
    """Each patch's key, mean over heads."""

    def read(self, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Return (P, N, Dk)."""
        return key[:, :, self.context.class_tokens :].mean(1)


@signal(
    "cls_logits",
    "(B, N) `cls_attention` before its softmax: scaled products of queries and keys, mean over heads",
    units=True,
)
class ClassLogits(TowerAttention):
    """Logits of the class token's query, before the softmax."""

    def read(self, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Return (P, N), from the one class query of an image, or from all queries if there is none."""
        averaged = self.context.parts.facts.class_attention == "mean"
        class_query = query if averaged else query[:, :, :1]
        return mean_logits(class_query, key, scaling)[:, self.context.class_tokens :]


@signal(
    "cls_attention",
    "(B, N) attention that the tower's class token pays each patch, mean over heads, fp32; on towers "
    "without one the substitute that `model.facts.class_attention` names",
    units=True,
)
@signal(
    "wide_cls_attention",
    "(B, N) `cls_attention` of one head as wide as the tower in place of its own heads, fp32",
    units=True,
)
class ClassAttention(TowerAttention):
    """Attention of the class token's query, after the softmax."""

    def read(self, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Return (P, N), from the one query of an image (class token, or probe of the pooling head), or from all."""
        if self.context.parts.facts.class_attention in ("token", "probe"):
            rows = attention_rows(query[:, :, :1], key, scaling, None)
            return rows[:, 0, self.context.class_tokens :]
        return received_unmasked(query, key, scaling)


@signal(
    "tower_received",
    "(B, N) attention that each patch receives in a tower layer, mean over heads and all queries, a "
    "class token's too, fp32",
    units=True,
)
class TowerReceived(TowerAttention):
    """Attention that each patch receives from all queries."""

    def read(self, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Return (P, N)."""
        return received_unmasked(query, key, scaling)[:, self.context.class_tokens :]


def tower_layer(parts: ModelParts, need: Need) -> int | None:
    """Return the index of the tower layer that a signal is read in, None for the one that the projector reads."""
    if need.layer is None or need.depth is None:
        return need.layer
    return max(0, round((need.layer + 1) * len(parts.tower_layers()) / need.depth) - 1)


def _merge_heads(states: Tensor) -> Tensor:
    """Return (B, 1, S, H Dh) of (B, H, S, Dh)."""
    return states.transpose(1, 2).flatten(2).unsqueeze(1)


@signal(
    "tower_states",
    "(B, N, D) mean of the tower's hidden states over its last third, 16 to 24 of 24, fp32",
    units=True,
)
class TowerStates(UnitSignal):
    """Sums states as they are computed.

    With hidden state 0 the input of layer 0 and hidden state i the output of layer i - 1, the states from 2 n / 3 to n
    of the n layers are used: 16 to 24 of 24. n counts all layers of the tower, including one with output that the
    projector does not read.
    """

    def __init__(self, context: Context, site: Site, need: Need) -> None:
        super().__init__(context, site, need)
        layers = context.parts.tower_layers()
        self._layers = list(layers)[-(-2 * len(layers) // 3) - 1 :]
        self._sums: list[Tensor] = []

    @property
    def watched_layers(self) -> list[nn.Module]:
        """The layers with outputs that are summed."""
        return self._layers

    def hook_tower(self, clock: Clock) -> list[RemovableHandle]:
        """Reset the sums and watch the layers until the handles are removed; `clock` counts it as selection."""
        self._sums = []
        return [
            layer.register_forward_hook(
                partial(self._add, clock, layer is self._layers[0]), with_kwargs=True
            )
            for layer in self._layers
        ]

    def _add(
        self,
        clock: Clock,
        first: bool,
        module: nn.Module,
        args: Any,
        kwargs: Mapping[str, Any],
        output: Tensor,
    ) -> None:
        with clock.phase("select"):
            states = output.to(torch.promote_types(output.dtype, torch.float32))
            images = [states]
            if states.dim() == 2:  # a tower of packed images has no image axis
                lengths = kwargs["cu_seqlens"].diff().tolist()
                images = [image.unsqueeze(0) for image in states.split(lengths)]
            patches = torch.cat([image[:, self.context.class_tokens :] for image in images], 1)
            units = self.context.parts.to_units(patches)
            if first:
                self._sums.append(units)
            else:
                self._sums[-1] = self._sums[-1].to(units.device) + units

    def units(self) -> Tensor:
        """Return (units, D) in the projector's order, in at least fp32."""
        return torch.cat(self._sums) / len(self._layers)
