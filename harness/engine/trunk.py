"""The first decoder layers of one prompt, run once for all methods that leave them unchanged.

Up to the layer before which a method first acts, its prefill is that of the unreduced model. A trunk stores the output
of those layers: states, keys and values, and the queries that methods score with. A pass that starts from it uses these
instead of running the layers, so that its answers, logits and records are bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from espalier.harness.engine.attention_probe import AttentionTap
from espalier.harness.engine.model_parts import StopForward, hooked, replaced_forwards
from espalier.harness.errors import UserError


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

    @contextmanager
    def replayed(self, layers: Sequence[Any], tap: AttentionTap) -> Iterator[None]:
        """Replace the first layers' forward by their stored output, for one prefill.

        Args:
            layers: of the decoder, those that the pass leaves unchanged; fewer may be stored.
            tap: shows the queries and keys of these layers to their watchers.
        """
        layers = layers[: len(self.outputs)]

        def forward(number: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            output = self.outputs[number]
            if hidden.shape != output.shape:
                raise UserError(
                    f"generation.num_beams: the prompt's stored layers have {len(output)} rows, got {len(hidden)}; "
                    "valid: the same number"
                )
            cache = kwargs["past_key_values"]
            if cache is not None:
                cache.update(*self.cached[number], number)
            if self.heads:
                tap.show(layers[number].self_attn, *self.heads[number])
            if number == len(layers) - 1:
                replaced.close()  # decoding steps are the layers' own
            return output

        with ExitStack() as replaced:
            pairs = ((layer, partial(forward, number)) for number, layer in enumerate(layers))
            replaced.enter_context(replaced_forwards(pairs))
            yield


@contextmanager
def recorded_trunk(decoder: Any, depth: int, room: float) -> Iterator[Trunk]:
    """Fill a trunk while the unreduced model runs inside the block, and end the run after its last layer.

    Args:
        decoder: the text stack.
        depth: number of layers, at least one.
        room: limit of the trunk in bytes; once reached, no further layer is run.
    """
    trunk = Trunk()
    # The final norm follows the last layer.
    modules = [*decoder.layers, decoder.norm][: depth + 1]
    readable = decoder.config._attn_implementation != "eager"

    def record_heads(query: Tensor, key: Tensor, scaling: float) -> None:
        trunk.heads.append((query, key, scaling))

    def before_layer(number: int, module: nn.Module, args: Any) -> None:
        if number == depth or (number and trunk.bytes >= room):
            raise StopForward

    def after_layer(
        number: int, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor
    ) -> None:
        layer = kwargs["past_key_values"].layers[number]
        trunk.outputs.append(output)
        trunk.cached.append((layer.keys, layer.values))

    tap = AttentionTap(
        [(layer.self_attn, record_heads) for layer in modules[:depth]] if readable else []
    )
    handles = [
        module.register_forward_pre_hook(partial(before_layer, number))
        for number, module in enumerate(modules)
    ] + [
        module.register_forward_hook(partial(after_layer, number), with_kwargs=True)
        for number, module in enumerate(modules[:depth])
    ]
    with hooked(handles), tap, suppress(StopForward):
        yield trunk
