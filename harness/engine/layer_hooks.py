"""Hooks before the decoder's layers: sites act, and later layers get tables and masks of the remaining tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from espalier.harness.engine.decode_steps import DecodeSteps
from espalier.harness.engine.masks import reference_mask
from espalier.harness.engine.prefill import Prefill
from espalier.harness.engine.sites.site import Arguments, Sites


class LayerHooks:
    """Applies the stages of a prefill, and later of decoding steps, to the layers.

    Args:
        prefill: the batch.
        sites: of the method.
        steps: returns the decoding steps; called once the prefill is over.
    """

    def __init__(
        self, prefill: Prefill, sites: Sequence[Sites], steps: Callable[[], DecodeSteps]
    ) -> None:
        self._prefill = prefill
        self._sites = sites
        self._steps = steps
        self._acting = frozenset(layer for group in sites for layer in group.layers())

    def install(self) -> list[RemovableHandle]:
        """Hook the decoder layers from the first that differs from the plain model; the caller removes the handles."""
        prefill, setup = self._prefill, self._prefill.setup
        decoder, handles = setup.adapter.decoder, []
        if prefill.deepstack is not None:
            handles += prefill.deepstack.hook(decoder.layers, prefill.active_stage)
        layers = [*self._acting]
        if setup.decode_site is not None:
            layers.append(setup.decode_site.layer)
        if setup.evicting is not None or (setup.emulate and prefill.shortened):
            layers.append(0)
        if not layers:
            return handles
        # The final norm follows the last layer; sites that only read may act before it.
        modules = [*decoder.layers, decoder.norm]
        last = max(len(decoder.layers), *(layer + 1 for layer in layers))
        return handles + [
            modules[layer].register_forward_pre_hook(partial(self._hook, layer), with_kwargs=True)
            for layer in range(min(layers), last)
        ]

    def _hook(
        self, layer: int, module: nn.Module, args: tuple[Tensor, ...], kwargs: Arguments
    ) -> Any:
        hidden = args[0]
        if not self._prefill.running:
            corrected = self._steps().layer_arguments(layer, hidden, kwargs)
            return None if corrected is None else (args, corrected)
        acts = layer in self._acting
        if acts:
            # The library moves a layer's arguments to its card after this hook; the final norm takes no tables.
            tables = kwargs.get("position_embeddings", ())
            rotary = tuple(table.to(hidden.device) for table in tables)
            for sites in self._sites:
                hidden = sites.reach(layer, hidden, rotary)
        if not self._prefill.shortened:
            return ((hidden, *args[1:]), kwargs) if acts else None
        return (hidden, *args[1:]), self._stage_arguments(layer, hidden, kwargs)

    def _stage_arguments(self, layer: int, hidden: Tensor, kwargs: Arguments) -> Arguments:
        """Return a layer's arguments with the tables and the mask of the current stage."""
        setup = self._prefill.setup
        stage = self._prefill.stage.move(hidden.device)
        if (types := setup.adapter.layer_types) is not None:
            if "position_embeddings" not in kwargs:  # the final norm takes none
                return kwargs
            return {**kwargs, **types.arguments(stage, layer, hidden), "position_ids": None}
        if setup.emulate:
            if stage.mask is None:
                config = setup.adapter.decoder.config
                stage.mask = reference_mask(config, hidden, stage.valid, 0)
            kwargs = {**kwargs, "attention_mask": stage.mask}
        elif stage.first > 0:
            mask = stage.mask
            if setup.adapter.facts.text.is_linear(layer):
                mask = stage.valid if stage.padded else None
            kwargs = {**kwargs, "attention_mask": mask, "position_ids": None}
        if stage.rotary is not None:
            kwargs = {**kwargs, "position_embeddings": stage.rotary}
        return kwargs
