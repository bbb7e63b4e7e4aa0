"""The base of methods that act at a few decoder layers and keep tokens there in the proportions of a schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from espalier.methods.base import MethodError, TokenReducer
from espalier.methods.checks import require


@dataclass(frozen=True)
class Scheduled(TokenReducer):
    """Keeps as many tokens at each of its layers as a schedule states, scaled to the budget.

    Attributes:
        layers: decoder layers, from 0, before or after which tokens go.
        depth: decoder layers of the model that `layers` are meant for; others act at the same shares of their depth.
        schedule: tokens after each layer; only their proportions count.
    """

    #: 1 if tokens go after the layers, 0 before them.
    after: ClassVar[int] = 0

    layers: tuple[int, ...] = ()
    depth: int = 32
    schedule: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check layers and schedule."""
        inside = (-self.after, *self.layers, self.depth - self.after)
        rising = self.layers != () and all(a < b for a, b in pairwise(inside))
        last = self.depth - 1 - self.after
        valid = f"layers in ascending order, {1 - self.after} to {last} (method.params.depth)"
        require(rising, "layers", self.layers, valid)
        falling = all(a >= b > 0 for a, b in pairwise((math.inf, *self.schedule)))
        fits = falling and len(self.schedule) == len(self.layers)
        valid = f"{len(self.layers)} positive numbers, one for each of layers, none larger than the one before"
        require(fits, "schedule", self.schedule, valid)

    def layers_of(self, depth: int) -> list[int]:
        """Return the layers before which tokens go in a model of `depth` layers, each once.

        Raises:
            MethodError: the model has too few layers.
        """
        layers = [0]
        for layer in self.layers:
            place = (layer + self.after) * depth / self.depth
            layers.append(max(layers[-1] + 1, math.floor(place + 0.5)))
        if layers[-1] >= depth:
            valid = f"a model of {len(layers)} layers or more, not {depth}"
            raise MethodError(f"method.params.layers={self.layers!r} does not fit; valid: {valid}")
        return layers[1:]

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        """Scale the schedule until `share` is left at its end; no site keeps more than all."""
        del n_sites
        return tuple(min(1.0, share * count / self.schedule[-1]) for count in self.schedule)
