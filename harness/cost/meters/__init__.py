"""Meters: counters that are read before and after every batch of answers.

A meter is a file in harness/cost/meters that defines one class, and an engine setting of the same name that is marked
as `Metered`. Checks, run key, journal, result and tables derive the rest from the mark.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar, Self

PACKAGE = __name__


@dataclass(frozen=True)
class Metered:
    """Marks an engine setting that turns on the meter of its name.

    Attributes:
        unit: of the counter.
        quantity: the quantity counted, for tables.
    """

    unit: str
    quantity: str


class CostMeter(ABC):
    """A counter that never falls."""

    #: Seconds by which a reading may be out of date; 0 for counters that are exact.
    lag: ClassVar[float] = 0.0

    @classmethod
    @abstractmethod
    def open(cls, devices: Sequence[str]) -> Self:
        """Return the meter of the devices of a run, named as in torch.

        Raises:
            UserError: this machine cannot count it.
        """

    @abstractmethod
    def read(self) -> float:
        """Return the counter after all work that was queued before."""


def open_meter(name: str, devices: Sequence[str]) -> CostMeter:
    """Return the open meter of an engine setting.

    Raises:
        UserError: this machine cannot count it.
    """
    module = import_module(f"{PACKAGE}.{name}")
    (meter,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, CostMeter)
        and value.__module__ == module.__name__
    )
    return meter.open(devices)
