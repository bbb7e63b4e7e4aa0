"""Simulated cards: tensors that say where they lie, compute on the host, and refuse to meet those of another card.

A card is a device `cpu:N`; the host is `cpu`. As on GPUs, an operation takes tensors of one device, and beside them
single numbers (0-dimensional tensors) of the host; an index may lie on the host; copies alone cross. Models are spread
by accelerate's own hooks. Times, memory and kernels are not simulated. The mode holds in the thread that entered it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import dispatch_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from espalier.harness.api.loaded_models import Model, with_spec
from espalier.harness.models.adapter import Adapter

HOST = torch.device("cpu")

#: Take single numbers of any device by reading them.
READERS = frozenset({"tensor", "as_tensor"})

#: Read only the shape of their second tensor.
SHAPED = frozenset({"expand_as", "view_as", "reshape_as"})

#: Wait for the card of their first tensor: the host needs values, or how many there are.
WAITING = frozenset(
    {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose"}
    | {"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select"}
)

#: Take no number of the host beside tensors of a card.
JOINS = frozenset({"cat", "stack"})


class Cards(TorchFunctionMode):
    """Gives each tensor made inside the block its device, and checks those that meet.

    Attributes:
        crossings: copies from one device to another, each as (from, to).
        waits: further calls that wait for a card.
        made: number of tensors made on a card from numbers of the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.crossings: list[tuple[str, str]] = []
        self.waits: list[str] = []
        self.made = 0

    def transfers(self) -> tuple[int, int]:
        """How often the host waited for a card, and how often it sent to one."""
        from_host = [source == str(HOST) for source, _ in self.crossings]
        to_host = [target == str(HOST) for _, target in self.crossings]
        return len(self.waits) + sum(to_host), self.made + sum(from_host)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.__name__
        if name == "__get__" and func.__self__ is Tensor.device:
            return device_of(args[0])
        if name in ("to", "cpu", "type_as"):
            return self._moved(name, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        place = common_device(name, args, tensors)
        masks = name == "__getitem__" and any(
            isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1])
        )
        if tensors and device_of(tensors[0]) != HOST and (name in WAITING or masks):
            self.waits.append(name)
        if name in ("numpy", "__array__") and place != HOST:
            raise TypeError(f"can't convert a tensor of {place} to numpy")
        if kwargs.get("device") is not None:
            place, kwargs["device"] = torch.device(kwargs["device"]), HOST
            self.made += name in READERS and place != HOST
        result = func(*args, **kwargs)
        if name == "__set__":  # of an attribute, such as `data`
            vars(args[0])["card"] = device_of(args[1])
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and not any(made is tensor for tensor in tensors):
                vars(made)["card"] = place
        return result

    def _moved(self, name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Return what `to`, `cpu` or `type_as` return."""
        source, *arguments = args
        copied = kwargs.pop("copy", False)
        if arguments and isinstance(arguments[0], Tensor):
            like = arguments.pop(0)
            arguments = [device_of(like), like.dtype, *arguments]
        wanted, dtype, _, layout = torch._C._nn._parse_to(*arguments, **kwargs)
        before = device_of(source)
        place = HOST if name == "cpu" else wanted or before
        if place != before:
            self.crossings.append((str(before), str(place)))
        result: Tensor = source.to(
            dtype=dtype or source.dtype,
            copy=copied or place != before,
            memory_format=layout or torch.preserve_format,
        )
        if isinstance(
            source, nn.Parameter
        ):  # made anew without its card before accelerate moves and ties it
            result = nn.Parameter(result, requires_grad=source.requires_grad)
        vars(result)["card"] = place
        return result


def device_of(tensor: Tensor) -> torch.device:
    """The device that a tensor says it lies on."""
    place: torch.device = vars(tensor).get("card", HOST)
    return place


def common_device(name: str, args: Any, tensors: Sequence[Tensor]) -> torch.device:
    """The device of an operation on `tensors`.

    Raises:
        RuntimeError: they lie on several, as on GPUs.
    """
    if name in READERS:
        return HOST
    if name == "copy_" or name in SHAPED or (name == "__setitem__" and not has_tensors(args[1])):
        return device_of(args[0])
    checked = tensors
    if name in ("__getitem__", "__setitem__"):  # an index may lie on the host
        checked = [t for t in tensors if t is args[0] or device_of(t) != HOST]
    places = {device_of(t) for t in checked if name in JOINS or t.dim() or device_of(t) != HOST}
    if len(places) > 1:
        raise RuntimeError(
            f"{name}: expected all tensors to be on the same device, got {sorted(map(str, places))}"
        )
    return places.pop() if places else HOST


def has_tensors(index: Any) -> bool:
    return any(isinstance(part, Tensor) for part in tree_leaves(index))


# ---------------------------------------------------------------------- models


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
    # A tied head has a copy of its own on its card.
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
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
    places = dict(_places(model, "", fixed, first))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        (owner,) = (place for place in places if f"{name}.".startswith(f"{place}."))
        vars(tensor)["card"] = torch.device("cpu", places[owner])
    keys = getattr(model, "_skip_keys_device_placement", None)
    dispatch_model(
        model,
        {name: f"cpu:{place}" for name, place in places.items()},
        main_device="cpu:0",
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
