"""When a drafted token stands: greedy decoding, and rejection sampling that leaves the target's distribution alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from espalier.harness.decoding.speculative.position_random import Purpose, RandomNumbers

#: What a side says comes next: the likeliest id, or probabilities (V,).
Row = Tensor | int


class Rule(Protocol):
    """Judges drafted tokens against the target's next-token row `p`."""

    def stands(self, token: int, p: Row, q: Tensor | None, position: int, turn: int) -> bool:
        """Say whether a drafted token is kept; `q` is the row it was drawn from, None: it was chosen outright."""

    def rest(self, token: int, p: Row, q: Tensor | None) -> Row:
        """Return the target's row after `token` was refused."""

    def choose(self, p: Row, position: int) -> int:
        """Return the target's own token."""


class Greedy:
    """A token stands if it is the target's likeliest; rows are the likeliest ids (ties: the lowest)."""

    def stands(self, token: int, p: Row, q: Tensor | None, position: int, turn: int) -> bool:
        """Compare ids."""
        del q, position, turn
        return token == int(p)

    def rest(self, token: int, p: Row, q: Tensor | None) -> Row:
        """Return the same row: the likeliest token stays the likeliest."""
        del token, q
        return p

    def choose(self, p: Row, position: int) -> int:
        """Return the likeliest id."""
        del position
        return int(p)


def drawn(row: Tensor, level: float) -> Tensor:
    """Return () the id at which the cumulated row (V,) passes `level` in [0, 1) of its sum; nobody waits for it."""
    cumulated = row.double().cumsum(0)
    found = torch.searchsorted(cumulated, level * cumulated[-1:], right=True)
    return found[0].clamp(max=len(row) - 1)


@dataclass(frozen=True)
class Sampling:
    """Rejection sampling: keep with min(1, p/q), else draw from norm(max(0, p - q)); rows are probabilities.

    Accepted and replaced tokens together are distributed as the target's own (Leviathan et al., arXiv 2211.17192). A
    token that was chosen outright counts as drawn from a one-hot row. A drafter may know fewer ids than the target;
    those behind its last one are ids that it never draws.
    """

    numbers: RandomNumbers

    def stands(self, token: int, p: Row, q: Tensor | None, position: int, turn: int) -> bool:
        """Compare the position's number with p / q."""
        said = 1.0 if q is None else float(q[token])
        level = self.numbers.uniform(position, "accept", turn)
        return level * said < float(_probabilities(p)[token])

    def rest(self, token: int, p: Row, q: Tensor | None) -> Row:
        """Return norm(max(0, p - q)); p itself where nothing is left, which only rounding can bring about."""
        left = _probabilities(p).clone()
        if q is None:
            left[token] = 0
        else:
            said = q.to(left.device)
            left[: len(said)] -= said
            left = left.clamp(min=0)
        total = left.sum()
        return left / total if float(total) > 0 else p

    def choose(self, p: Row, position: int) -> int:
        """Draw from `p`."""
        return self.draw(_probabilities(p), position, "replace")

    def draw(self, row: Tensor, position: int, purpose: Purpose) -> int:
        """Return the id at which the cumulated row (V,) passes the position's number."""
        return int(drawn(row, self.numbers.uniform(position, purpose)))


def _probabilities(row: Row) -> Tensor:
    """Return the row of a side that samples.

    Raises:
        TypeError: it is the id that a greedy side says.
    """
    if isinstance(row, int):
        raise TypeError("sampling judges rows of probabilities; this side says its likeliest id")
    return row
