"""The source of chance: generators that depend on the run's seed, the sample and the site alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch


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
