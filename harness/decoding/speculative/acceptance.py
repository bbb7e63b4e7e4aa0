"""Acceptance of drafted tokens: greedy, and rejection sampling that preserves the target's distribution.

Random numbers derive from positions: both sides of a run, and every rerun, draw the same numbers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Purpose = Literal["draft", "accept", "replace"]

#: A side's prediction of the next token: the likeliest id, or probabilities (V,).
Row = Tensor | int


@dataclass(frozen=True)
class RandomNumbers:
    """Uniform numbers by (seed, position, purpose)."""

    seed: int

    def uniform(self, position: int, purpose: Purpose, turn: int = 0) -> float:
        """Return a number in [0, 1) for a position of the answer; `turn` counts siblings tried there."""
        name = f"{self.seed}/{position}/{purpose}/{turn}".encode()
        digest = hashlib.blake2b(name, digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) / 2**53


class Rule(Protocol):
    """Compares drafted tokens with the target's next-token row `p`."""

    def accepts(self, token: int, p: Row, q: Tensor | None, position: int, turn: int) -> bool:
        """Return whether a drafted token is accepted; `q` is the row it was drawn from, if it was drawn."""

    def residual(self, token: int, p: Row, q: Tensor | None) -> Row:
        """Return the target's row after `token` was refused."""

    def choose(self, p: Row, position: int) -> int:
        """Return the target's own token."""


class Greedy:
    """A token is accepted if it is the target's likeliest; rows are the likeliest ids (ties: the lowest)."""

    def accepts(self, token: int, p: Row, q: Tensor | None, position: int, turn: int) -> bool:
        """Compare ids."""
        del q, position, turn
        return token == int(p)

    def residual(self, token: int, p: Row, q: Tensor | None) -> Row:
        """Return the same row: the likeliest token stays the likeliest."""
        del token, q
        return p

    def choose(self, p: Row, position: int) -> int:
        """Return the likeliest id."""
        del position
        return int(p)


def draw_from(row: Tensor, level: float) -> Tensor:
    """Return () the id at which the cumulative row (V,) passes `level` in [0, 1) of its sum, without synchronizing."""
    cumulated = row.double().cumsum(0)
    index = torch.searchsorted(cumulated, level * cumulated[-1:], right=True)
    return index[0].clamp(max=len(row) - 1)


@dataclass(frozen=True)
class Sampling:
    """Rejection sampling: keep with min(1, p/q), else draw from norm(max(0, p - q)); rows are probabilities.

    Accepted and replaced tokens together have the target's own distribution (Leviathan et al., arXiv 2211.17192). A
    token chosen deterministically counts as drawn from a one-hot row. A drafter may know fewer ids than the target; it
    never draws ids after its last one.
    """

    numbers: RandomNumbers

    def accepts(self, token: int, p: Row, q: Tensor | None, position: int, turn: int) -> bool:
        """Compare the position's number with p / q."""
        draft_probability = 1.0 if q is None else float(q[token])
        level = self.numbers.uniform(position, "accept", turn)
        return level * draft_probability < float(_probabilities(p)[token])

    def residual(self, token: int, p: Row, q: Tensor | None) -> Row:
        """Return norm(max(0, p - q)); p itself if the difference is zero, which only rounding can cause."""
        remainder = _probabilities(p).clone()
        if q is None:
            remainder[token] = 0
        else:
            drafted = q.to(remainder.device)
            remainder[: len(drafted)] -= drafted
            remainder = remainder.clamp(min=0)
        total = remainder.sum()
        return remainder / total if float(total) > 0 else p

    def choose(self, p: Row, position: int) -> int:
        """Draw from `p`."""
        return self.draw(_probabilities(p), position, "replace")

    def draw(self, row: Tensor, position: int, purpose: Purpose) -> int:
        """Return the id at which the cumulative row (V,) passes the position's number."""
        return int(draw_from(row, self.numbers.uniform(position, purpose)))


def _probabilities(row: Row) -> Tensor:
    """Return the row of a sampling side.

    Raises:
        TypeError: it is the id of a greedy side.
    """
    if isinstance(row, int):
        raise TypeError("sampling judges rows of probabilities; this side has its likeliest id")
    return row
