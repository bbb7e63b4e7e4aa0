"""Checks of methods: hyper-parameters, layers inside the model, and conditions on values.

The host waits for a device to read its values, so that a pass reads all conditions together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from espalier.methods.views import MethodError, Site


def require(holds: bool, key: str, value: Any, valid: str) -> None:
    """Raise MethodError with the config key, the value and the valid values, unless `holds`."""
    if not holds:
        raise MethodError(f"method.params.{key}={value!r} is out of range; valid: {valid}")


def require_choices(method: object, **choices: Any) -> None:
    """Raise MethodError unless each named hyper-parameter is among the values of its `Literal`."""
    for key, kind in choices.items():
        value, valid = getattr(method, key), get_args(kind)
        require(value in valid, key, value, ", ".join(valid))


def layer_site(key: str, layer: int, depth: int) -> Site:
    """Return the site before decoder layer `layer`, for methods that read the layer below it.

    Raises:
        MethodError: `layer` is 0, or not a layer of the model.
    """
    valid = f"1 to {depth - 1} (the model has {depth} decoder layers)"
    require(1 <= layer < depth, key, layer, valid)
    return Site("layer", layer)


def early_site(layer: int, depth: int) -> Site:
    """Return the prefix for layer 0 and the site before a decoder layer for any other.

    Raises:
        MethodError: the model has no such layer.
    """
    valid = f"0 (before the decoder) to {depth - 1} (the model has {depth} decoder layers)"
    require(0 <= layer < depth, "layer", layer, valid)
    return Site("layer", layer) if layer else Site("prefix")


def require_finite(values: Tensor, name: str) -> Tensor:
    """Return `values`, or raise PlanError if any of them is NaN or infinite; read as in `require_all`."""
    if values.numel():
        error = PlanError(f"{name}: NaN or infinite among {values.numel()} values")
        require_all([Condition(are_finite(values), lambda: error)])
    return values


def are_finite(values: Tensor) -> Tensor:
    """Return () whether no value is NaN or infinite. Cost: one pass; a count takes 5 to 9 times as long."""
    low, high = values.aminmax()  # a NaN is both
    return low - low == high - high


# ---------------------------------------------------------------------- values of a device


class PlanError(MethodError):
    """A method broke the contract of `Plan`, or failed on the way to one.

    Args:
        line: what is wrong.
        owner: of the code, before the line; "" if it is not known yet.
    """

    def __init__(self, line: str, owner: str = "") -> None:
        super().__init__(f"{owner}: {line}" if owner else line)
        self.owner = owner


@dataclass
class Condition:
    """A () boolean on a device, the error where it is false, and the owner of the code."""

    holds: Tensor
    error: Callable[[], MethodError]
    owner: str = ""


class Conditions:
    """The conditions of a pass that are not read yet, in their order."""

    def __init__(self) -> None:
        self.unread: list[Condition] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Keep the conditions of methods inside the block unread."""
        token = _OPEN.set(self)
        try:
            yield
        finally:
            _OPEN.reset(token)

    def flags(self, device: torch.device) -> Tensor:
        """Return on a device the (n,) booleans of what holds."""
        flags = [condition.holds.to(device) for condition in self.unread]
        return torch.stack(flags) if flags else torch.zeros(0, dtype=torch.bool, device=device)

    def check(self, flags: Sequence[float]) -> None:
        """Forget the conditions, and raise the error of the first that does not hold by the `flags` on the host."""
        conditions, self.unread = self.unread, []
        for condition, holds in zip(conditions, flags, strict=True):
            if not holds:
                error = condition.error()
                plain = isinstance(error, PlanError) and condition.owner
                raise PlanError(str(error), condition.owner) if plain else error

    def settle(self) -> None:
        """Read all of them, if there are any. Waits for the device once."""
        if self.unread:
            self.check(self.flags(self.unread[0].holds.device).tolist())


_OPEN: ContextVar[Conditions | None] = ContextVar("conditions", default=None)


def open_conditions() -> Conditions:
    """Return the conditions that a pass collects; outside of passes new ones, which nobody would read."""
    return _OPEN.get() or Conditions()


def require_all(conditions: Sequence[Condition]) -> None:
    """Raise the error of the first condition that does not hold; inside a pass, once it is read.

    Outside of passes it waits for the device once.
    """
    collected = _OPEN.get()
    pending = Conditions() if collected is None else collected
    pending.unread += conditions
    if collected is None:
        pending.settle()


def read(*tensors: Tensor) -> list[Tensor]:
    """Return tensors on the host, after all conditions so far. Waits for the device once.

    Raises:
        MethodError: the first condition that does not hold.
    """
    pending, device = open_conditions(), tensors[0].device
    parts = [pending.flags(device), *tensors]
    flat = torch.cat([part.to(device, torch.double).flatten() for part in parts]).cpu()
    flags, *values = flat.split([part.numel() for part in parts])
    pending.check(flags.tolist())
    return [
        value.view(tensor.shape).to(tensor.dtype)
        for value, tensor in zip(values, tensors, strict=True)
    ]
