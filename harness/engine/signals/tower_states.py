"""The mean of the tower's hidden states over its last third, unit by unit: `tower_states`.

Watches the outputs of the tower's last layers while they run, one call of the tower after the other.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from espalier.harness.cost.clock import Clock
from espalier.harness.engine.signals.producer import Context
from espalier.harness.engine.signals.tower_attention import UnitSignal
from espalier.methods.base import Need, Site


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
            layer.register_forward_hook(partial(self._add, clock, layer is self._layers[0]))
            for layer in self._layers
        ]

    def _add(self, clock: Clock, first: bool, module: nn.Module, args: Any, output: Tensor) -> None:
        with clock.phase("select"):
            states = output.to(torch.promote_types(output.dtype, torch.float32))
            # A tower of packed images has no image axis.
            states = states.unsqueeze(0) if states.dim() == 2 else states
            units = self.context.parts.to_units(states[:, self.context.class_tokens :])
            if first:
                self._sums.append(units)
            else:
                self._sums[-1] = self._sums[-1].to(units.device) + units

    def units(self) -> Tensor:
        """Return (units, D) in the projector's order, in at least fp32."""
        return torch.cat(self._sums) / len(self._layers)
