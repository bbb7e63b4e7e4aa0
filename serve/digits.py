"""Whole numbers in the channels after an embedding, exact in every type: bfloat16 holds them to 256 only."""

from __future__ import annotations

import torch
from torch import Tensor

#: A number is written in this many digits of this many bits: up to 2^21.
DIGITS, BITS = 3, 7

#: Numbers after each embedding: time, row and column from the item's start, and the item's span.
NUMBERS = 4

WIDTH = DIGITS * NUMBERS


def append(embeddings: Tensor, numbers: Tensor) -> Tensor:
    """Return embeddings (T, D) with numbers (T, NUMBERS) in WIDTH channels more.

    Raises:
        ValueError: a number is negative or has more digits.
    """
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < 1 << DIGITS * BITS:
        raise ValueError(f"positions {int(numbers.min())} to {int(numbers.max())} do not fit")
    shifts = torch.arange(DIGITS, device=numbers.device) * BITS
    digits = (numbers.unsqueeze(-1) >> shifts) & ((1 << BITS) - 1)
    return torch.cat([embeddings, digits.flatten(1).to(embeddings)], dim=-1)


def split(channels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the embeddings and the numbers (T, NUMBERS) of `append`."""
    digits = channels[:, -WIDTH:].round().long().unflatten(1, (NUMBERS, DIGITS))
    shifts = torch.arange(DIGITS, device=channels.device) * BITS
    return channels[:, :-WIDTH], (digits << shifts).sum(-1)
