"""A graph of tokens by likeness and by place in the grid: D2Pruner (arXiv 2512.19443)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from espalier.methods.select.cosines import Cosines
from espalier.methods.select.similarity import neighbours


@dataclass(frozen=True)
class FusedEdges:
    """The edges of equations (5), (7) and (8) of D2Pruner, computed on request; a token is adjacent to itself.

    Attributes:
        semantic: S_sem.
        low: (B, 1, 1) min S_sem.
        spread: (B, 1, 1) max S_sem - min S_sem.
        board: (2, B, N) places of the tokens.
        alpha: weight of semantic similarity.
        theta_sim: the threshold.
    """

    semantic: Cosines
    low: Tensor
    spread: Tensor
    board: Tensor
    alpha: float
    theta_sim: float

    def rows(self, indices: Tensor) -> Tensor:
        """Return (B, K, N) booleans: the tokens adjacent to `indices` (B, K)."""
        return self._edges(self.semantic.rows(indices), indices)

    def row(self, pick: Tensor, merit: Tensor) -> Tensor:
        """Return (B, N) booleans: the tokens adjacent to `pick` (B, 1); for `merit` see `Cosines.row`."""
        return self._edges(self.semantic.row(pick, merit).unsqueeze(1), pick).squeeze(1)

    def _edges(self, similarity: Tensor, indices: Tensor) -> Tensor:
        """Return the edges (B, K, N) of rows of similarities, which are written to."""
        stretched = similarity.sub_(self.low).div_(self.spread).clamp_(max=1)
        fused = stretched.mul_(self.alpha)
        if self.alpha < 1:
            fused.add_(neighbours(self.board, indices), alpha=1 - self.alpha)
        return fused > self.theta_sim
