"""`layer` sites: they shorten the hidden states that enter their decoder layer, and so all later layers.

Earlier layers still see every token, and their caches stay long. `shorten_states` removes tokens from hidden states
between layers; features that a family adds after later layers follow automatically (harness/engine/deepstack.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from espalier.harness.engine.layout import take
from espalier.harness.engine.masks import prefill_mask
from espalier.harness.engine.positions import closed_positions, rotary_tables
from espalier.harness.engine.reduce import write_merged
from espalier.harness.engine.sites.prefix import plan_before_decoder
from espalier.harness.engine.sites.site import Sites

if TYPE_CHECKING:
    from espalier.harness.engine.prefill import Prefill
    from espalier.harness.engine.reduce import Decision
    from espalier.harness.engine.sites.site import Arguments


class LayerSites(Sites):
    """The method sees hidden states; before layer 0 these are the input of the decoder stack."""

    def enter(self, kwargs: Arguments, features: Tensor | None) -> Arguments:
        """Apply the sites before layer 0."""
        for number, site in self.sites:
            if site.layer == 0:
                kwargs = plan_before_decoder(self.prefill, number, kwargs)
        return kwargs

    def layers(self) -> Sequence[int]:
        """Return the sites' layers above 0."""
        return [site.layer for _, site in self.sites if site.layer > 0]

    def reach(self, layer: int, hidden: Tensor, rotary: tuple[Tensor, ...]) -> Tensor:
        """Apply the sites of this layer, and prepare tables and masks of the later ones."""
        prefill = self.prefill
        for number, site in self.sites:
            if site.layer != layer:
                continue
            before = prefill.stage.move(hidden.device)
            with prefill.clock.phase("select"):
                tables = prefill.rotary(layer, hidden, rotary)
                prefill.setup.signals.reach(site, before, hidden, tables)
            decision = prefill.decide(number, prefill.tokens(hidden))
            hidden = shorten_states(prefill, layer, decision, hidden, rotary)
        return hidden


def shorten_states(
    prefill: Prefill, first: int, decision: Decision, hidden: Tensor, rotary: tuple[Tensor, ...]
) -> Tensor:
    """Apply a decision that holds from layer `first` on to hidden states (B, M, D), and prepare that layer's tables."""
    decoder, before = prefill.setup.adapter.decoder, prefill.stage
    hidden = write_merged(hidden, before.slots, decision)
    index = prefill.advance(first, decision)
    stage = prefill.stage
    if index is not None:
        hidden = take(hidden, index, -2)
    if prefill.setup.adapter.layer_types is not None:
        return hidden
    if index is not None:
        stage.rotary = tuple(take(table, index, -2) for table in before.rotary or rotary)
        stage.mask = prefill_mask(decoder.config, hidden, stage.valid, stage.padded)
    if prefill.setup.renumber and stage is not before:
        stage.rotary = rotary_tables(decoder.rotary_emb, hidden, closed_positions(stage.valid))
    return hidden
