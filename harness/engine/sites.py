"""The kinds of sites from the projector on: what each shortens, when, and with which hooks.

`vision` sites decide on the features that enter the projector, and `prefix` sites on the projected tokens among words.
Both shorten the input of decoder layer 0, as `tower` sites do (`gather_arguments`), for every model alike: some call
the projector once, some several times, some inside the tower. Features that a method merged are projected again.

`layer` sites shorten the hidden states that enter their decoder layer, and so all later layers (`shorten_states`).
Earlier layers still see every token, and their caches stay long.

`block` sites shorten the states between a decoder layer's attention and its MLP. During the pass the layer runs in two
halves, which replace its forward: its attention still sees every token, its MLP and all later layers only the remaining
ones. Layers need a norm before each half, as in all supported families.

Features that a family adds after its first layers have been taken out before, and follow automatically (`DeepStack`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from espalier.harness.cost.facts import NO_WORK, Work
from espalier.harness.engine.layer_inputs import closed_positions, prefill_mask, rotary_tables
from espalier.harness.engine.layout import CAUSAL, mix, take, visibility_of
from espalier.harness.engine.model_parts import ModelParts, replaced_forwards
from espalier.harness.engine.prefill import Decision, LayerHalves, Prefill, Rows, write_merged
from espalier.methods.base import MethodError
from espalier.methods.views import Site

Arguments = dict[str, Any]

#: A site and its number among all of the method's.
NumberedSite = tuple[int, Site]


def reads_features(sites: Sequence[Site]) -> bool:
    """Return whether any site reads the projector's input."""
    return any(site.on_features for site in sites)


def tower_sites(sites: Sequence[Site]) -> list[Site]:
    """Return the sites inside the vision tower, before the point where prompts are stored."""
    return [site for site in sites if site.in_tower]


def unreduced_layers(sites: Sequence[Site], depth: int) -> int:
    """Return how many of `depth` decoder layers run as in the unreduced model: those before the first site."""
    return min((site.shortens or 0 for site in sites), default=depth)


class Sites:
    """Consecutive sites of one kind, in one pass. A kind overrides the moments at which it acts.

    Args:
        prefill: the batch.
        sites: these sites, first to last.
    """

    def __init__(self, prefill: Prefill, sites: Sequence[NumberedSite]) -> None:
        self.prefill = prefill
        self.sites = sites

    def open(self) -> None:
        """Act before the model runs."""

    def close(self) -> None:
        """Undo what `open` did; it may not have been called."""

    def watch(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Store queries and keys of the running tower block."""

    def enter(self, kwargs: Arguments, features: Tensor | None) -> Arguments:
        """Act at the input of the decoder stack.

        Args:
            kwargs: arguments of the decoder stack.
            features: (units, D) input of the projector; None if not needed, or without images.

        Returns:
            The new arguments.
        """
        return kwargs

    def layers(self) -> Sequence[int]:
        """Return the decoder layers before which these sites act."""
        return ()

    def reach(self, layer: int, hidden: Tensor, rotary: tuple[Tensor, ...]) -> Tensor:
        """Act before a decoder layer.

        Args:
            layer: its number.
            hidden: (B, M, D) states that enter it.
            rotary: tables of the positions that it was given; empty for the final norm.

        Returns:
            The new states (B, M', D).
        """
        return hidden

    def work(self, row: int) -> Work:
        """Return the change in a row's cost before the decoder."""
        return NO_WORK


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
        several = position_ids.dim() > 2  # (axes, B, L)
        position_ids = (
            torch.stack([take(axis, index, -1) for axis in position_ids])
            if several
            else take(position_ids, index, -1)
        )
    if index is not None:
        hidden = take(hidden, index, -2)
        types, config = prefill.setup.adapter.layer_types, prefill.setup.adapter.decoder.config
        # Gaps in the positions of a causal stack without a mask would be read as packed sequences.
        needed = stage.padded or visibility_of(config) is CAUSAL
        mask = stage.valid if needed else None
        if types is not None:
            mask = types.stack_masks(stage, hidden)
        kwargs = {**kwargs, "attention_mask": mask}
    return {**kwargs, "inputs_embeds": hidden, "position_ids": position_ids}


class VisionSites(Sites):
    """The method sees features; a merged token is the projection of merged features.

    Where the model blends projected units into tokens (bilinear pooling), features do not correspond to tokens: the
    method sees the blend, and merging happens after the projector.
    """

    def enter(self, kwargs: Arguments, features: Tensor | None) -> Arguments:
        """Apply each site and gather the remaining tokens."""
        # Without images in the batch there are no features, and no row has tokens to mix.
        units = torch.empty(0) if features is None else features.to(kwargs["inputs_embeds"].device)
        for number, _ in self.sites:
            kwargs = self._reduce(number, units, kwargs)
        return kwargs

    def _reduce(self, number: int, units: Tensor, kwargs: Arguments) -> Arguments:
        prefill = self.prefill
        layout = prefill.layout.repeat(prefill.beams)

        def blended(rows: Rows, n: int) -> Tensor:
            share = None if layout.share is None else layout.share[rows][:, :n]
            return mix(units, layout.source[rows][:, :n], share)

        decision = prefill.decide(number, blended, prefill.tokens(kwargs["inputs_embeds"]))
        if decision.merged:
            # Merged features are projected to the decoder's width.
            merged = tuple(
                replace(group, values=_project(prefill.setup.adapter, group.values))
                if group.features
                else group
                for group in decision.merged
            )
            decision = replace(decision, merged=merged)
            counts = zip(decision.counts, layout.blended, strict=True)
            reprojected = tuple(0 if mixed else count for count, mixed in counts)
            prefill.reprojected = reprojected[:: prefill.beams]
        return gather_arguments(prefill, decision, kwargs)


def _project(adapter: ModelParts, features: Tensor) -> Tensor:
    """Project (b, k, D) features."""
    projected = adapter.project(features.flatten(0, 1)).view(*features.shape[:2], -1)
    return projected.to(features.device)


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
            _capture(prefill, site, layer, hidden, rotary)
            decision = prefill.decide(number, prefill.tokens(hidden))
            hidden = shorten_states(prefill, layer, decision, hidden, rotary)
        return hidden


def _capture(
    prefill: Prefill, site: Site, layer: int, hidden: Tensor, rotary: tuple[Tensor, ...]
) -> None:
    """Capture signals from the states (B, M, D) that enter the layer of a site."""
    before = prefill.stage.move(hidden.device)
    with prefill.clock.phase("select"):
        prefill.setup.signals.reach(site, before, hidden, prefill.rotary(layer, hidden, rotary))


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


#: Modules that a layer needs to be run in halves.
PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")

#: Norm before the MLP of layers in which `post_attention_layernorm` normalises the attention's output.
SANDWICH = "pre_feedforward_layernorm"


class BlockSites(Sites):
    """The method sees the states after the attention."""

    def __init__(self, prefill: Prefill, sites: Sequence[NumberedSite]) -> None:
        super().__init__(prefill, sites)
        layers = prefill.setup.adapter.decoder.layers
        self._numbers = {site.layer: number for number, site in sites}
        self._modules = {site.layer: layers[site.layer] for _, site in sites}
        for layer, module in self._modules.items():
            lacking = [name for name in PARTS if not hasattr(module, name)]
            if lacking:
                raise MethodError(
                    f"decoder layer {layer} cannot run in halves: {type(module).__name__} has no {', '.join(lacking)}"
                )
        self._replaced = ExitStack()

    def open(self) -> None:
        """Replace the layers' forward by the halves."""
        halves = ((module, partial(self._forward, n)) for n, module in self._modules.items())
        self._replaced.enter_context(replaced_forwards(halves))

    def close(self) -> None:
        """Restore the layers' forward."""
        self._replaced.close()

    def layers(self) -> Sequence[int]:
        """Return the sites' layers."""
        return list(self._modules)

    def reach(self, layer: int, hidden: Tensor, rotary: tuple[Tensor, ...]) -> Tensor:
        """Capture signals from the states that enter the layer."""
        if layer in self._modules:
            _capture(self.prefill, dict(self.sites)[self._numbers[layer]], layer, hidden, rotary)
        return hidden

    def _forward(self, layer: int, hidden: Tensor, **kwargs: Any) -> Tensor:
        module, prefill = self._modules[layer], self.prefill
        sandwich = hasattr(module, SANDWICH)  # Gemma's norms follow the halves too
        put_out, _ = module.self_attn(hidden_states=module.input_layernorm(hidden), **kwargs)
        if sandwich:
            put_out = module.post_attention_layernorm(put_out)
        attended = hidden + put_out
        halves = LayerHalves(prefill.tokens(hidden), prefill.tokens(put_out))
        decision = prefill.decide(self._numbers[layer], prefill.tokens(attended), halves=halves)
        rotary = kwargs["position_embeddings"]
        attended = shorten_states(prefill, layer + 1, decision, attended, rotary)
        output: Tensor
        if sandwich:
            output = module.mlp(module.pre_feedforward_layernorm(attended))
            output = attended + module.post_feedforward_layernorm(output)
        else:
            output = attended + module.mlp(module.post_attention_layernorm(attended))
        return output
