"""Models on simulated cards, spread by accelerate's own hooks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

from accelerate import dispatch_model
from torch import nn

from espalier.harness.api.loaded_models import Model, with_spec
from espalier.harness.models.adapter import Adapter
from espalier.harness.tools.rehearsal.simulated_cards import SimulatedCards


class Cards(SimulatedCards):
    """Three cards, on which the models of tests are spread."""

    def __init__(self) -> None:
        super().__init__(3)

    def transfers(self) -> tuple[int, int]:
        """How often the host waited for a card or its values, and sent to one."""
        return self.reads + self.waits, self.uploads


def spread(
    adapter: Adapter, cuts: Sequence[int], tail: int, first: int = 0, tower: Sequence[int] = ()
) -> Model:
    """A copy of a model on cards, to be used inside the mode that it was made in.

    Args:
        adapter: of a model on the host.
        cuts: decoder layers that begin on the next card; none: everything is on the first.
        tail: card of what follows the layers: norm, rotary tables and head. The library's automatic map has them on the
            last, whatever layers are there.
        first: card of the first decoder layer, and of all that is neither decoder layer nor tower.
        tower: tower layers that begin on the next card; the tower begins on card 0.
    """
    model = copy.deepcopy(adapter.model)
    head = model.get_output_embeddings()
    spread_adapter = type(adapter)(model, adapter.processor, adapter.spec)
    decoder = spread_adapter.decoder
    fixed: dict[nn.Module, int] = {spread_adapter.tower: 0}
    for layers, begin, at in (
        (spread_adapter.tower_layers(), 0, tower),
        (decoder.layers, first, cuts),
    ):
        fixed |= {
            layer: begin + sum(number >= cut for cut in at) for number, layer in enumerate(layers)
        }
    ends = (decoder.norm, getattr(decoder, "rotary_emb", None), head)
    fixed |= {module: tail for module in ends if module is not None}
    # A tied head has a copy of its own on its card, since each tensor of a module is copied.
    places = dict(_places(model, "", fixed, first))
    for owner, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    path = f"{owner}.{name}."
                    (card,) = (places[place] for place in places if path.startswith(f"{place}."))
                    moved = tensor.detach().to(f"cuda:{card}")
                    is_buffer = tensors is module._buffers
                    tensors[name] = moved if is_buffer else nn.Parameter(moved, requires_grad=False)
    keys = getattr(model, "_skip_keys_device_placement", None)
    dispatch_model(
        model,
        {name: f"cuda:{place}" for name, place in places.items()},
        main_device="cuda:0",
        skip_keys=keys,
        force_hooks=True,
    )
    return as_model(spread_adapter)


def as_model(adapter: Adapter) -> Model:
    """A model as `espalier.apply` takes it."""
    return Model(
        adapter.spec, True, lambda wanted: nullcontext(with_spec(adapter, wanted)), None, {}
    )


def _places(
    module: nn.Module, name: str, fixed: dict[nn.Module, int], place: int
) -> Iterator[tuple[str, int]]:
    """The cards of the largest modules that lie on one card, by name; of those that are not fixed, their parent's."""
    place = fixed.get(module, place)
    if not fixed.keys() & {*module.modules()} - {module}:
        yield name, place
        return
    prefix = f"{name}." if name else ""
    for tensors in (module.named_parameters, module.named_buffers):
        yield from ((prefix + leaf, 0) for leaf, _ in tensors(recurse=False))
    for child, part in module.named_children():
        yield from _places(part, prefix + child, fixed, place)
