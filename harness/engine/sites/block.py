"""`block` sites: they shorten the states between a decoder layer's attention and its MLP.

During the pass the layer runs in two halves, which replace its forward: its attention still sees every token, its MLP
and all later layers only the remaining ones. Layers need a norm before each half, as in all supported families.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from espalier.harness.engine.reduce import LayerHalves
from espalier.harness.engine.replaced_forward import replaced_forwards
from espalier.harness.engine.sites.layer import shorten_states
from espalier.harness.engine.sites.site import Sites
from espalier.methods.base import MethodError

if TYPE_CHECKING:
    from espalier.harness.engine.prefill import Prefill
    from espalier.harness.engine.sites.site import NumberedSite

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
            prefill, site = self.prefill, dict(self.sites)[self._numbers[layer]]
            before = prefill.stage.move(hidden.device)
            with prefill.clock.phase("select"):
                tables = prefill.rotary(layer, hidden, rotary)
                prefill.setup.signals.reach(site, before, hidden, tables)
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
