"""The first decoder layers of one prompt, run once for all methods that leave them unchanged.

Up to the layer before which a method first acts, its prefill is that of the unreduced model. A trunk stores the output
of those layers: states, keys and values, and the queries that methods score with. A pass that starts from it uses these
instead of running the layers, so that its answers, logits and records are bit-identical.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from espalier.harness.engine.attention_probe import AttentionTap
from espalier.harness.engine.replaced_forward import replaced_forwards
from espalier.harness.errors import UserError
from espalier.methods.base import Site


class StopForward(BaseException):
    """Ends a model's forward early. Not an error: nothing may catch it inside the model."""


@dataclass(eq=False)
class Trunk:
    """Output of the first layers of a decoder for one batch; read-only.

    It takes `4 B L D` numbers a layer (fewer where heads share keys and values) and lives as long as its prompt.

    Attributes:
        outputs: (B, L, D) states after each layer.
        heads: queries (B, H, L, Dh), keys (B, H_kv, L, Dh) and scaling of each layer; empty under eager attention,
            where queries cannot be read.
        cached: keys and values (B, H_kv, L, Dh) of each layer.
    """

    outputs: list[Tensor] = field(default_factory=list)
    heads: list[tuple[Tensor, Tensor, float]] = field(default_factory=list)
    cached: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes held. Keys in `heads` are those of the cache."""
        queries = (query for query, _, _ in self.heads)
        entries = (entry for pair in self.cached for entry in pair)
        return sum(tensor.nbytes for tensor in (*self.outputs, *queries, *entries))


def unreduced_layers(sites: Sequence[Site], depth: int) -> int:
    """Return how many of `depth` decoder layers run as in the unreduced model: those before the first site."""
    return min((site.shortens or 0 for site in sites), default=depth)


class TrunkRecorder:
    """Hooks that fill a trunk while the unreduced model runs, and end the run after its last layer.

    Args:
        decoder: the text stack.
        depth: number of layers, at least one.
        room: limit of the trunk in bytes; once reached, no further layer is run.
    """

    def __init__(self, decoder: Any, depth: int, room: float) -> None:
        self.trunk = Trunk()
        # The final norm follows the last layer.
        self._modules = [*decoder.layers, decoder.norm][: depth + 1]
        self._depth, self._room = depth, room
        readable = decoder.config._attn_implementation != "eager"
        layers = self._modules[:depth] if readable else []
        self._tap = AttentionTap([(layer.self_attn, self._record_heads) for layer in layers])
        self._open = ExitStack()

    def __enter__(self) -> TrunkRecorder:
        """Install the hooks."""
        with ExitStack() as opening:
            opening.enter_context(self._tap)
            for number, module in enumerate(self._modules):
                before_handle = module.register_forward_pre_hook(
                    partial(self._before_layer, number)
                )
                opening.callback(before_handle.remove)
                if number < self._depth:
                    after_handle = module.register_forward_hook(
                        partial(self._after_layer, number), with_kwargs=True
                    )
                    opening.callback(after_handle.remove)
            self._open = opening.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Remove the hooks; the early end of the run is not an error."""
        self._open.close()
        return isinstance(error, StopForward)

    def _before_layer(self, number: int, module: nn.Module, args: Any) -> None:
        if number == self._depth or (number and self.trunk.bytes >= self._room):
            raise StopForward

    def _record_heads(self, query: Tensor, key: Tensor, scaling: float) -> None:
        self.trunk.heads.append((query, key, scaling))

    def _after_layer(
        self, number: int, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor
    ) -> None:
        layer = kwargs["past_key_values"].layers[number]
        self.trunk.outputs.append(output)
        self.trunk.cached.append((layer.keys, layer.values))


class TrunkReplay:
    """Replaces the first layers' forward by a trunk's stored output, for one prefill.

    Args:
        trunk: of the prompt; None: nothing is replaced.
        layers: of the decoder, those that the pass leaves unchanged; the trunk may have fewer.
        tap: shows the queries and keys of these layers to their watchers.
    """

    def __init__(self, trunk: Trunk | None, layers: Sequence[nn.Module], tap: AttentionTap) -> None:
        self._trunk = trunk or Trunk()
        self._layers = list(layers)[: len(self._trunk.outputs)]
        self._tap = tap
        self._replaced = ExitStack()

    def __enter__(self) -> TrunkReplay:
        """Replace the layers' forward."""
        pairs = ((layer, partial(self._forward, n)) for n, layer in enumerate(self._layers))
        self._replaced.enter_context(replaced_forwards(pairs))
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the layers' forward."""
        self._replaced.close()

    def _forward(self, number: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        trunk, output = self._trunk, self._trunk.outputs[number]
        if hidden.shape != output.shape:
            raise UserError(
                f"generation.num_beams: the prompt's stored layers have {len(output)} rows, got {len(hidden)}; "
                "valid: the same number"
            )
        cache = kwargs["past_key_values"]
        if cache is not None:
            cache.update(*trunk.cached[number], number)
        if trunk.heads:
            layer: Any = self._layers[number]
            self._tap.show(layer.self_attn, *trunk.heads[number])
        if number == len(self._layers) - 1:
            self.__exit__()  # decoding steps are the layers' own
        return output
