"""Whole numbers in the channels after an embedding, exact in every type: bfloat16 holds them to 256 only."""

from __future__ import annotations

import torch
from torch import Tensor

#: A number is written in this many digits of this many bits: up to 2^21.
DIGITS, BITS = 3, 7

#: Numbers after each embedding: time, row and column from the item's start, and the item's span.
NUMBERS = 4

WIDTH = DIGITS * NUMBERS


def encode(numbers: Tensor) -> Tensor:
    """Return numbers (T, NUMBERS) of the host as (T, WIDTH) digits.

    Raises:
        ValueError: a number is negative or has more digits.
    """
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < 1 << DIGITS * BITS:
        raise ValueError(f"positions {int(numbers.min())} to {int(numbers.max())} do not fit")
    shifts = torch.arange(DIGITS) * BITS
    return ((numbers.unsqueeze(-1) >> shifts) & ((1 << BITS) - 1)).flatten(1)


def append(embeddings: Tensor, digits: Tensor) -> Tensor:
    """Return embeddings (T, D) with digits (T, WIDTH) in channels after them."""
    return torch.cat([embeddings, digits.to(embeddings)], dim=-1)


def decode(digits: Tensor) -> Tensor:
    """Return the numbers (T, NUMBERS) of digits (T, WIDTH) in any type."""
    shifts = torch.arange(DIGITS, device=digits.device) * BITS
    numbers: Tensor = digits.round().long().unflatten(1, (NUMBERS, DIGITS)) << shifts
    return numbers.sum(-1)
