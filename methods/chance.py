"""The source of chance: generators that depend on the run's seed, the sample and the site alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from espalier.methods.method import Method
from espalier.methods.views import MethodError


def generators_of(
    method: Method, seed: int, samples: Sequence[str], site: int
) -> Sequence[torch.Generator]:
    """Return the generators of a method that draws, one for each row; of any other, a sequence that refuses reading."""
    if not method.draws:
        return NoChance(type(method).__name__)
    return row_generators(seed, samples, site)


def row_generators(
    seed: int, samples: Sequence[str], site: int, device: torch.device | str = "cpu"
) -> list[torch.Generator]:
    """Return one generator for each row, seeded by (run seed, sample id, site number)."""
    generators = []
    for sample in samples:
        digest = hashlib.sha256(f"{seed}\0{sample}\0{site}".encode()).digest()
        generator = torch.Generator(device)
        generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        generators.append(generator)
    return generators


class NoChance(Sequence[torch.Generator]):
    """The generators of a method that does not draw: its runs of several seeds count as one, so it must not read them.

    Args:
        method: its class.
    """

    def __init__(self, method: str) -> None:
        self._method = method

    def __getitem__(self, index: Any) -> NoReturn:
        """Raise MethodError."""
        raise self._error()

    def __len__(self) -> NoReturn:
        """Raise MethodError."""
        raise self._error()

    def _error(self) -> MethodError:
        return MethodError(
            f"{self._method} draws random numbers and does not declare it; valid: `draws = True` in its class"
        )
