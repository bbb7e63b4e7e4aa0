"""Simulated cards for models of any size: large floating tensors have a shape and no values.

Integers, masks and small floats are real, so that prompts are laid out, budgets are counted and indices are followed as
in a run. Values that large floats would decide are plausible: scores are ranked evenly over all places, a greedy pick
differs from the one before, half of the entries exceed a threshold, everything is finite. Where a method chooses among
tokens or entries, floats have values up to a larger size, random ones where none are known and in place of products.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import flop_registry

from espalier.harness.runs.cluster.resources import GpuKind
from espalier.harness.tools.rehearsal.simulated_cards import (
    INDEXED,
    CardTensor,
    SimulatedCards,
    change,
    common_device,
    content_of,
    tensors_of,
)
from espalier.methods.blame import Blame

META = torch.device("meta")

#: Floats of more elements have no values; the second limit holds where a method chooses.
LARGE, LARGE_IN_CHOICES = 2**22, 2**26

#: After so many random numbers, a prime, they repeat: drawing them would take most of a rehearsal.
PERIOD = 2**20 - 3

#: Most numbers that are packed for one transfer to the host.
PACKED = 2**12

#: Make tensors of sizes alone.
FACTORIES = frozenset(
    {f"{name}{end}" for name in ("zeros", "ones", "empty", "full") for end in ("", "_like")}
    | {"new_zeros", "new_ones", "new_empty", "new_full", "empty_strided"}
    | {"rand", "randn", "rand_like", "randn_like", "arange", "linspace"}
)


class RealSizes(SimulatedCards):
    """Cards of one kind, for tensors of real sizes.

    Attributes:
        flops: of products.
        traffic: bytes that operations read and write, each as a kernel of its own.
        seconds: sum over operations of the longer of both at the card's peaks.
    """

    def __init__(self, count: int, kind: GpuKind) -> None:
        super().__init__(count, kind.memory)
        self.kind = kind
        self.flops, self.traffic, self.seconds = 0, 0, 0.0
        self._picks: Counter[int] = Counter()
        self._shapes: dict[Any, Any] = {}
        self._most = LARGE
        self._numbers = torch.rand(PERIOD, generator=torch.Generator().manual_seed(0))

    def __enter__(self) -> Self:
        """Show the cards, with attention as one kernel: no map of scores is stored."""
        name = "scaled_dot_product_attention"
        self._attention = getattr(functional, name)
        self._stack.enter_context(patch.object(functional, name, self._attend))
        self._stack.enter_context(patch.multiple(Blame, **self._in_methods()))
        return super().__enter__()

    def _in_methods(self) -> dict[str, Any]:
        """Return what happens where the code of a method begins and ends."""
        leave = Blame.__exit__

        def begin(blame: Blame) -> None:
            # A cache's scores are products over all pairs of tokens, in every layer.
            self._most = LARGE if blame.call == "score" else LARGE_IN_CHOICES

        def end(blame: Blame, *error: Any) -> None:
            self._most = LARGE
            leave(blame, *error)

        return {"__enter__": begin, "__exit__": end}

    def compute(self, func: Any, name: str, arguments: Any, args: Any, kwargs: Any) -> Any:
        """Return the real result of small tensors, and a shape or a plausible value of large ones."""
        contents = list(tensors_of((args, kwargs)))
        count = flop_registry.get(func.overloadpacket)
        is_product = count is not None and sum(map(Tensor.numel, contents)) > LARGE
        if is_product or any(content.is_meta for content in contents):
            result = self._shaped(func, name, arguments, args, kwargs)
        elif name in FACTORIES:
            result = func(*args, **{**kwargs, "device": META})
            if not self._is_large(result):
                result = func(*args, **kwargs)
        else:
            result = super().compute(func, name, arguments, args, kwargs)
        if not func.is_view:
            flops = count(*args, **kwargs, out_val=result) if count else 0
            self._work(flops, [*contents, *tensors_of(result)])
        return result

    def copy(self, func: Any, content: Tensor, kwargs: Any, place: torch.device) -> Tensor:
        """Return a copy; integers of large floats are zeros, and their values for the host a half."""
        copied: Tensor = func(content, **kwargs)
        if not content.is_meta:
            return copied
        if not copied.is_floating_point():
            return torch.zeros(copied.shape, dtype=copied.dtype)
        return copied if place.type == "cuda" else guessed(copied)

    def overwrite(self, func: Any, into: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> None:
        """Write values where both tensors have them; a float that takes unknown ones loses its own."""
        if content_of(into).is_meta:
            return
        if not source.is_meta:
            func(content_of(into), source, *args, **kwargs)
        elif isinstance(into, CardTensor):
            self._forget(into)

    def wrap(self, content: Tensor, place: torch.device) -> Tensor:
        """Return a tensor of a card, without values if it is large."""
        if place.type == "cuda" and self._is_large(content):
            content = content.to(META)
        return super().wrap(content, place)

    def _is_large(self, tensor: Tensor) -> bool:
        """Return whether a tensor has no values on these cards."""
        return tensor.is_floating_point() and tensor.numel() > self._most

    def content(self, value: Any) -> Any:
        """Return the content of a tensor; where a method chooses, with random values from 0 to 1 if it had none."""
        content = content_of(value)
        is_choice = self._most == LARGE_IN_CHOICES
        if is_choice and content.is_meta and content.numel() and not self._is_large(content):
            steps = zip(content.shape, content.stride(), strict=True)
            count = 1 + sum((size - 1) * step for size, step in steps)
            numbers = self._numbers.to(content.dtype).repeat(-(-count // PERIOD))
            value.content = numbers.as_strided(content.shape, content.stride())
        return content_of(value)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        tensors = [query, key, value, *tensors_of((args, kwargs))]
        place = common_device("scaled_dot_product_attention", "", (), tensors)
        query, key, value, *_ = contents = [content_of(tensor) for tensor in tensors]
        if query.is_meta or place.type != "cuda":
            *rows, heads, length, _ = query.shape
            shape = (*rows, length, heads, value.shape[-1])
            result = torch.empty(shape, dtype=query.dtype, device=META).transpose(-2, -3)
        else:
            args, kwargs = change((args, kwargs), content_of)
            result = self._attention(query, key, value, *args, **kwargs)
        pairs = query.shape[:-1].numel() * key.shape[-2]
        self.kernels += 1
        self._work(2 * pairs * (query.shape[-1] + value.shape[-1]), [*contents, result])
        return self.wrap(result, place)

    def _work(self, flops: int, tensors: list[Tensor]) -> None:
        traffic = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.flops += flops
        self.traffic += traffic
        self.seconds += max(flops / self.kind.flops, traffic / self.kind.bandwidth)

    def _shaped(self, func: Any, name: str, arguments: Any, args: Any, kwargs: Any) -> Any:
        """Return the shape of a result of tensors without values, or a plausible value."""
        if name == "_local_scalar_dense":
            return 0.5
        if name == "equal":
            return False
        if name in ("nonzero", "masked_select"):
            raise RuntimeError(f"a rehearsal has no values for {name} of {tuple(args[0].shape)}")
        if name == "multinomial":
            return torch.arange(args[1]).expand(*args[0].shape[:-1], args[1]).clone()
        if name == "masked_scatter":
            return torch.empty_like(args[0], device=META)
        if name == "cat" and args[0][0].dim() == 1 and sum(map(len, args[0])) <= PACKED:
            # Numbers that are packed for one transfer: those that are known stay.
            return torch.cat([part if not part.is_meta else guessed(part) for part in args[0]])
        if name in INDEXED:
            args = (args[0], numbered(args[1]), *args[2:])
        targets = written(func, *arguments)
        result = change(
            self._shape(func, args, kwargs), lambda tensor: self._plausible(name, tensor, args)
        )
        if not targets:
            return result
        for target, value in zip(targets, tensors_of(result), strict=True):
            if value.is_meta or not func._schema.arguments[-1].is_out:
                self._forget(target)
            else:
                target.content.copy_(value)
        contents = [target.content for target in targets]
        return contents[0] if len(contents) == 1 else tuple(contents)

    def _forget(self, tensor: CardTensor) -> None:
        """Take the values of a float, which others without values are written into; integers keep theirs.

        A part of another tensor gets random ones, which the whole sees.
        """
        if not tensor.is_floating_point() or tensor.content.is_meta:
            return
        if tensor.content.nbytes < tensor.content.untyped_storage().nbytes():
            tensor.content.uniform_(generator=torch.Generator().manual_seed(0))
        else:
            tensor.content = tensor.content.to(META)

    def _shape(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation on tensors of the meta device.

        Results are remembered by shapes: layers are alike, and torch finds many shapes slowly.
        """
        args, kwargs = change((args, kwargs), lambda tensor: tensor.to(META))
        if "device" in kwargs:
            kwargs["device"] = META
        if func.is_view or func._schema.is_mutable or func is torch.ops.aten._unsafe_view.default:
            return func(*args, **kwargs)
        key = (func, signature((args, kwargs)))
        if key not in self._shapes:
            self._shapes[key] = func(*args, **kwargs)
        return change(self._shapes[key], torch.empty_like)

    def _plausible(self, name: str, result: Tensor, args: Any) -> Tensor:
        """Return an integer or boolean result that large floats decide; floats as they are."""
        if result.is_floating_point() or result.is_complex():
            return result
        if result.dtype == torch.bool:
            return plausible_mask(name, result, args)
        if name in ("topk", "sort", "argsort") and result.dim():
            dim = (
                args[2]
                if name == "topk" and len(args) > 2
                else args[1]
                if name != "topk" and len(args) > 1
                else -1
            )
            return spread_evenly(result.shape, int(dim), args[0].shape[int(dim)])
        if name in ("argmax", "argmin", "max", "min") and args[0].dim():
            length = args[0].shape[args[1] if len(args) > 1 and args[1] is not None else -1]
            self._picks[length] += 1
            return torch.full(result.shape, self._picks[length] % length, dtype=result.dtype)
        return torch.zeros(result.shape, dtype=result.dtype)


def signature(value: Any) -> Any:
    """Return what the shape of a result depends on: shapes, strides and types of tensors, and other values."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(signature, value))
    if isinstance(value, dict):
        return tuple((key, signature(part)) for key, part in value.items())
    return type(value), value


def written(func: Any, args: Any, kwargs: Any) -> list[CardTensor]:
    """Return the tensors that an operation writes: those of `out=`, or the first of one in place."""
    outs = [kwargs[place.name] for place in func._schema.arguments if place.is_out]
    return outs or (list(args[:1]) if func._schema.is_mutable else [])


def guessed(tensor: Tensor) -> Tensor:
    """Return a half in place of each unknown number."""
    return torch.full(tensor.shape, 0.5, dtype=tensor.dtype)


def numbered(indices: Any) -> list[Any]:
    """Return indices with masks as numbers: how many a real mask selects is known."""
    numbers: list[Any] = []
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        numbers += index.nonzero(as_tuple=True) if is_mask else [index]
    return numbers


def plausible_mask(name: str, result: Tensor, args: Any) -> Tensor:
    """Return what a comparison of large floats gives: a half for an order, true for what sound values fulfil."""
    mask = torch.zeros(result.shape, dtype=torch.bool)
    if name in ("ge", "gt", "le", "lt") and result.dim():
        mask[..., ::2] = True
        return mask
    # `isfinite` is made of these: x == x and |x| != inf.
    equal = name == "eq" and args[0] is args[1]
    finite = name == "ne" and isinstance(args[1], float) and args[1] == float("inf")
    return mask.fill_(name in ("isfinite", "all", "isclose") or equal or finite)


def spread_evenly(shape: torch.Size, dim: int, length: int) -> Tensor:
    """Return ranks along `dim`: as many indices below `length` as it has, at equal distances, ascending."""
    count = shape[dim]
    sizes = [1] * len(shape)
    sizes[dim] = count
    order = torch.arange(count) * length // max(count, 1)
    return order.view(sizes).expand(shape).contiguous()
