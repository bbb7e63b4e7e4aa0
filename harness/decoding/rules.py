"""When a drafted token stands: greedy decoding, and rejection sampling that leaves the target's distribution alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from harness.decoding.chance import Chance, Purpose


class Rule(Protocol):
    """Judges drafted tokens against the target's next-token row `p`, an id or probabilities (V,)."""

    def stands(self, token: int, p: Tensor, q: Tensor | None, position: int, turn: int) -> bool:
        """Say whether a drafted token is kept; `q` is the row it was drawn from, None: it was chosen outright."""

    def rest(self, token: int, p: Tensor, q: Tensor | None) -> Tensor:
        """Return the target's row after `token` was refused."""

    def choose(self, p: Tensor, position: int) -> int:
        """Return the target's own token."""


class Greedy:
    """A token stands if it is the target's likeliest; rows are the likeliest ids (ties: the lowest)."""

    def stands(self, token: int, p: Tensor, q: Tensor | None, position: int, turn: int) -> bool:
        """Compare ids."""
        del q, position, turn
        return token == int(p)

    def rest(self, token: int, p: Tensor, q: Tensor | None) -> Tensor:
        """Return the same row: the likeliest token stays the likeliest."""
        del token, q
        return p

    def choose(self, p: Tensor, position: int) -> int:
        """Return the likeliest id."""
        del position
        return int(p)


@dataclass(frozen=True)
class Sampling:
    """Rejection sampling: keep with min(1, p/q), else draw from norm(max(0, p - q)); rows are probabilities.

    Accepted and replaced tokens together are distributed as the target's own (Leviathan et al., arXiv 2211.17192). A
    token that was chosen outright counts as drawn from a one-hot row.
    """

    chance: Chance

    def stands(self, token: int, p: Tensor, q: Tensor | None, position: int, turn: int) -> bool:
        """Compare the position's number with p / q."""
        drawn = 1.0 if q is None else float(q[token])
        return self.chance.uniform(position, "accept", turn) * drawn < float(p[token])

    def rest(self, token: int, p: Tensor, q: Tensor | None) -> Tensor:
        """Return norm(max(0, p - q)); p itself where nothing is left, which only rounding can bring about."""
        left = p.clone()
        if q is None:
            left[token] = 0
        else:
            left = (left - q).clamp(min=0)
        total = left.sum()
        return left / total if float(total) > 0 else p

    def choose(self, p: Tensor, position: int) -> int:
        """Draw from `p`."""
        return self.draw(p, position, "replace")

    def draw(self, row: Tensor, position: int, purpose: Purpose) -> int:
        """Return the id at which the cumulated row (V,) passes the position's number."""
        cumulated = row.double().cumsum(0)
        level = self.chance.uniform(position, purpose) * float(cumulated[-1])
        found = int(torch.searchsorted(cumulated, level, right=True))
        return min(found, len(row) - 1)
