"""Conditions on values of a device. The host waits for the device to read them, so that a pass reads them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.methods.views import MethodError


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
    """A () number on a device, the value that it must have, the error of any other, and the owner of the code."""

    number: Tensor
    error: Callable[[int], MethodError]
    valid: int = 1
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

    def numbers(self, device: torch.device) -> Tensor:
        """Return the (n,) numbers on a device."""
        numbers = [condition.number.to(device, torch.long) for condition in self.unread]
        return torch.stack(numbers) if numbers else torch.zeros(0, dtype=torch.long, device=device)

    def check(self, numbers: Sequence[int]) -> None:
        """Forget the conditions, and raise the error of the first that does not hold by `numbers` of the host."""
        conditions, self.unread = self.unread, []
        for condition, number in zip(conditions, numbers, strict=True):
            if number != condition.valid:
                error = condition.error(number)
                plain = isinstance(error, PlanError) and condition.owner
                raise PlanError(str(error), condition.owner) if plain else error

    def settle(self) -> None:
        """Read all of them, if there are any. Waits for the device once."""
        if self.unread:
            self.check(self.numbers(self.unread[0].number.device).tolist())


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
    parts = [pending.numbers(device), *tensors]
    flat = torch.cat([part.to(device, torch.double).flatten() for part in parts]).cpu()
    numbers, *values = flat.split([part.numel() for part in parts])
    pending.check(numbers.long().tolist())
    return [
        value.view(tensor.shape).to(tensor.dtype)
        for value, tensor in zip(values, tensors, strict=True)
    ]
