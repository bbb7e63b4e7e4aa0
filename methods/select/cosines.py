"""Cosines of all pairs of tokens: a matrix in memory if it fits, else rows computed on request.

Both give the same cosines up to rounding, which depends on the shape of a product, the number of threads and the
library. Picks that differ by rounding alone can change places from one machine to another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from espalier.methods.select.similarity import FEWEST, cosine_of_units, unit, upper_blocks
from espalier.methods.select.topk import rows_of

#: Bytes that a matrix may take by default.
LIMIT = 2**30
#: Rows computed at a time without a matrix: the requested one, and those likely to be requested next.
PANEL = 32

#: Returns whether a number of bytes may be held on a device.
Judge = Callable[[int, torch.device], bool]

_JUDGE: ContextVar[Judge] = ContextVar("judge", default=lambda n_bytes, device: n_bytes <= LIMIT)


class Cosines(ABC):
    """The (B, N, N) cosines of (B, N, D) tokens. The diagonal is 1, or 0 for a zero vector."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return (B, N) each token's cosine with itself. The tensor is the caller's."""

    @abstractmethod
    def nearest(self) -> Tensor:
        """Return (B, N) each token's largest cosine with another one; -2 if there is no other."""

    @abstractmethod
    def extremes(self) -> tuple[Tensor, Tensor]:
        """Return (B,) the smallest and the largest cosine of each row of the batch, the diagonal included."""

    @abstractmethod
    def rows(self, indices: Tensor) -> Tensor:
        """Return (B, K, N) the cosines of the tokens `indices` (B, K) with all. The tensor is the caller's."""

    @abstractmethod
    def subset(self, indices: Tensor) -> Cosines:
        """Return the cosines of the tokens `indices` (B, K) with each other."""

    @abstractmethod
    def row(self, pick: Tensor, merit: Tensor) -> Tensor:
        """Return (B, N) the cosines of the tokens `pick` (B, 1). The tensor is the caller's.

        Args:
            pick: (B, 1) index.
            merit: (B, N) floats: tokens with larger values are likely to be picked next.
        """


def cosines(features: Tensor) -> Cosines:
    """Return the cosines of (B, N, D) features: a matrix if 4 B N^2 bytes fit the memory, else computed on request.

    Fewer than 16 tokens always get a matrix.
    """
    return cosines_of_units(unit(features))


def cosines_of_units(units: Tensor) -> Cosines:
    """Return `cosines` of features (B, N, D) that `unit` returned."""
    n_rows, n_tokens, _ = units.shape
    if n_tokens < FEWEST or fits(4 * n_rows * n_tokens**2, units.device):
        return Held(cosine_of_units(units))
    return Computed(units)


def fits(n_bytes: int, device: torch.device) -> bool:
    """Return whether a matrix of this size may be held, by the current judge.

    The result affects time and memory, and picks by rounding alone.
    """
    return _JUDGE.get()(n_bytes, device)


@contextmanager
def judged_by(judge: Judge) -> Iterator[None]:
    """Let `judge` decide inside the block which matrices of cosines may be held."""
    token = _JUDGE.set(judge)
    try:
        yield
    finally:
        _JUDGE.reset(token)


def memory_limit(n_bytes: int) -> AbstractContextManager[None]:
    """Let a matrix of cosines take at most `n_bytes` inside the block, whatever is free; 0 holds none."""
    return judged_by(lambda wanted, device: wanted <= n_bytes)


class Held(Cosines):
    """The whole matrix (B, N, N). Takes it over: `nearest` writes to its diagonal and back."""

    def __init__(self, matrix: Tensor) -> None:
        """Take over a symmetric matrix (B, N, N)."""
        self.matrix = matrix
        rows = torch.arange(len(matrix), device=matrix.device).unsqueeze(1)
        #: Of each batch row, the number of the rows before; None: it is the only one.
        self._start = rows * matrix.shape[1] if len(matrix) > 1 else None

    def diagonal(self) -> Tensor:
        """Copy the diagonal."""
        return self.matrix.diagonal(dim1=1, dim2=2).clone()

    def nearest(self) -> Tensor:
        """Return the row maxima off the diagonal. Cost: O(N^2), one pass."""
        before, diagonal = self.diagonal(), self.matrix.diagonal(dim1=1, dim2=2)
        diagonal.fill_(-2)
        nearest = self.matrix.amax(dim=2)
        diagonal.copy_(before)
        return nearest

    def extremes(self) -> tuple[Tensor, Tensor]:
        """Return both from one pass, O(N^2)."""
        low, high = torch.aminmax(self.matrix.flatten(1), dim=1)
        return low, high

    def rows(self, indices: Tensor) -> Tensor:
        """Gather the rows."""
        places = indices if self._start is None else indices + self._start
        return self.matrix.flatten(0, 1).index_select(0, places.flatten()).view(*places.shape, -1)

    def subset(self, indices: Tensor) -> Cosines:
        """Gather rows and columns."""
        pairs = zip(self.matrix, indices, strict=True)
        return Held(torch.stack([row.index_select(0, at).index_select(1, at) for row, at in pairs]))

    def row(self, pick: Tensor, merit: Tensor) -> Tensor:
        """Gather one row, without a device synchronisation."""
        del merit
        return self.rows(pick).squeeze(1)


class Computed(Cosines):
    """Cosines that are computed on demand; only the last panel of rows is stored.

    Each row costs one device synchronisation, to find out whether the panel has it.
    """

    def __init__(self, units: Tensor) -> None:
        """Take tokens of length 1 (B, N, D)."""
        self.units = units
        self._across = units.transpose(1, 2)
        self._slot = torch.full(units.shape[:2], -1, device=units.device)
        self._panel = units.new_empty(0)

    def diagonal(self) -> Tensor:
        """Return the squared lengths, rounded. Cost: O(N D)."""
        return self.units.square().sum(dim=2).round_()

    def nearest(self) -> Tensor:
        """Return the maxima over blocks. Cost: O(N^2 D / 2)."""
        nearest = self.units.new_full(self.units.shape[:2], -2)
        for row, column, block in upper_blocks(self.units):
            block.diagonal(row - column, dim1=1, dim2=2).fill_(-2)
            for maxima, block_maxima in (
                (nearest[:, row : row + block.shape[1]], block.amax(dim=2)),
                (nearest[:, column:], block.amax(dim=1)),
            ):
                torch.maximum(maxima, block_maxima, out=maxima)
        return nearest

    def extremes(self) -> tuple[Tensor, Tensor]:
        """Return the extremes over blocks. Cost: O(N^2 D / 2)."""
        block_extremes = [
            block.flatten(1).aminmax(dim=1) for _, _, block in upper_blocks(self.units)
        ]
        low, high = (torch.stack(side) for side in zip(*block_extremes, strict=True))
        return low.amin(dim=0), high.amax(dim=0)

    def rows(self, indices: Tensor) -> Tensor:
        """Multiply out the rows. Cost: O(K N D)."""
        n_asked = indices.shape[1]
        if n_asked < FEWEST:
            indices = indices.repeat(1, FEWEST)[:, :FEWEST]
        rows = self.units[rows_of(indices), indices] @ self._across
        itself = indices.unsqueeze(2)
        return rows.scatter_(2, itself, rows.gather(2, itself).round_())[:, :n_asked]

    def subset(self, indices: Tensor) -> Cosines:
        """Gather the tokens; their matrix may fit."""
        return cosines_of_units(self.units[rows_of(indices), indices])

    def row(self, pick: Tensor, merit: Tensor) -> Tensor:
        """Look the row up in the panel, or compute the panel of this token and those of the highest merit."""
        slot = self._slot.gather(1, pick)
        if bool((slot < 0).any()):
            n_more = min(PANEL, merit.shape[1]) - 1
            panel = torch.cat([pick, merit.topk(n_more, dim=1).indices], dim=1)
            self._panel = self.rows(panel)
            place = torch.arange(panel.shape[1], device=panel.device).expand_as(panel)
            # The pick may come twice; either of its rows will do.
            self._slot.fill_(-1).scatter_(1, panel, place)
            slot = self._slot.gather(1, pick)
        return self._panel[rows_of(slot), slot].squeeze(1)
