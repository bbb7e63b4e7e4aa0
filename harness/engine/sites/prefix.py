"""`prefix` sites: they shorten the input of decoder layer 0, projected tokens among words.

`gather_arguments` removes tokens from the arguments of the decoder stack, for every kind of site that takes effect
there. Features that a family adds after its first layers have been taken out by then (harness/engine/deepstack.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.harness.engine.layout import take
from espalier.harness.engine.positions import closed_positions
from espalier.harness.engine.reduce import write_merged
from espalier.harness.engine.sites.site import Sites

if TYPE_CHECKING:
    from espalier.harness.engine.prefill import Prefill
    from espalier.harness.engine.reduce import Decision
    from espalier.harness.engine.sites.site import Arguments


class PrefixSites(Sites):
    """The method sees the tokens as they enter the decoder."""

    def enter(self, kwargs: Arguments, features: Tensor | None) -> Arguments:
        """Apply each site and gather the remaining tokens."""
        for number, _ in self.sites:
            kwargs = plan_before_decoder(self.prefill, number, kwargs)
        return kwargs


def plan_before_decoder(prefill: Prefill, number: int, kwargs: Arguments) -> Arguments:
    """Get the method's plans for the tokens that enter the decoder, and drop the others."""
    decision = prefill.decide(number, prefill.tokens(kwargs["inputs_embeds"]))
    return gather_arguments(prefill, decision, kwargs)


def gather_arguments(prefill: Prefill, decision: Decision, kwargs: Arguments) -> Arguments:
    """Apply a decision that takes effect before layer 0 to the arguments of the decoder stack."""
    hidden = write_merged(kwargs["inputs_embeds"], prefill.stage.slots, decision)
    index = prefill.advance(0, decision)
    stage = prefill.stage
    position_ids = kwargs["position_ids"]
    if prefill.setup.renumber:
        position_ids = closed_positions(stage.valid)
    elif index is not None:
        position_ids = _take_positions(position_ids, index)
    if index is not None:
        hidden = take(hidden, index, -2)
        types = prefill.setup.adapter.layer_types
        # Never None: gaps in the positions without a mask would be read as packed sequences.
        mask = stage.valid if types is None else types.stack_masks(stage, hidden)
        kwargs = {**kwargs, "attention_mask": mask}
    return {**kwargs, "inputs_embeds": hidden, "position_ids": position_ids}


def _take_positions(positions: Tensor, index: Tensor) -> Tensor:
    """Gather (B, L) or, with several rotary axes, (axes, B, L) positions."""
    if positions.dim() == 2:
        return take(positions, index, -1)
    return torch.stack([take(axis, index, -1) for axis in positions])
