"""A kept set that grows outwards: tokens far from it wait (VLM-Pruner, arXiv 2512.02700)."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.methods.checks import read
from espalier.methods.select.cosines import Cosines
from espalier.methods.select.tiles import Tiles
from espalier.methods.select.topk import rows_of

#: Weight of the distance in the likeness.
DISTANCE = 0.5


class KeptSet:
    """The tokens kept so far, and how like and how near each token is to the likest and the nearest of them.

    Args:
        similarity: of the tokens.
        grid: (B, N, 4) their places.
    """

    def __init__(self, similarity: Cosines, grid: Tensor) -> None:
        tiles = Tiles.of(grid)
        self._similarity, self._tile, self._place = similarity, tiles.index, grid[:, :, 2:].float()
        height, width = (tiles.of_token(table).float() for table in (tiles.height, tiles.width))
        self._diagonal = (height.square() + width.square()).sqrt()
        self._likeness = torch.full_like(self._diagonal, -1.0)
        #: Distance over diagonal.
        self._distance = torch.ones_like(self._diagonal)
        #: (B, N) whether a token is kept.
        self.chosen = torch.zeros_like(self._diagonal, dtype=torch.bool)

    def add(self, indices: Tensor, joins: Tensor) -> None:
        """Keep those of the tokens (B, K) for which `joins` (B, K) is true."""
        rows = rows_of(indices)
        self.chosen.scatter_(1, indices, self.chosen.gather(1, indices) | joins)
        similar = self._similarity.rows(indices).masked_fill_(~joins.unsqueeze(2), -1)
        torch.maximum(self._likeness, similar.amax(dim=1), out=self._likeness)
        distance = (
            (self._place[rows, indices].unsqueeze(2) - self._place.unsqueeze(1)).square().sum(3)
        )
        away = self._tile.gather(1, indices).unsqueeze(2) != self._tile.unsqueeze(1)
        distance = (distance.sqrt() / self._diagonal.unsqueeze(1)).masked_fill(
            away | ~joins.unsqueeze(2), 1
        )
        torch.minimum(self._distance, distance.amin(dim=1), out=self._distance)

    def grow(self, keep: int, theta: float, width: int) -> bool:
        """Carry out a round up to `keep` tokens, `width` at a time; return whether any row lacks tokens after it."""
        order = self.merit.masked_fill(self.chosen, torch.inf).argsort(dim=1, stable=True)
        count = (~self.chosen).sum(dim=1, keepdim=True)
        goes_on = torch.ones_like(count, dtype=torch.bool)
        for start in range(0, order.shape[1], width):
            missing = keep - self.chosen.sum(dim=1, keepdim=True)
            if not read((goes_on & (missing > 0)).any())[0]:
                break
            group = order[:, start : start + width]
            place = torch.arange(start, start + group.shape[1], device=group.device)
            real = (place < count) & goes_on
            merit = self.merit.gather(1, group).masked_fill(~real, torch.inf)
            joins = merit < theta
            rank = merit.argsort(dim=1, stable=True).argsort(dim=1)
            many = joins.sum(dim=1, keepdim=True) > missing
            joins = torch.where(many, real & (rank < missing), joins)
            self.add(group, joins)
            if start == 0:
                goes_on = joins.any(dim=1, keepdim=True)
        return bool(read((self.chosen.sum(dim=1) < keep).any())[0])

    @property
    def merit(self) -> Tensor:
        """(B, N) likeness with distance; low is good."""
        return self._likeness * (1 + DISTANCE * self._distance)
