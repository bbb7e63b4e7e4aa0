"""Pairwise cosine similarity, and the neighbourhood of the patch grid."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize


def cosine(features: Tensor) -> Tensor:
    """Return (B, N, N) cosine similarities of (B, N, D) features, computed in fp32. Cost: O(N^2 D), 4 N^2 bytes a row.

    A zero vector has similarity 0 to everything, itself included.
    """
    units = normalize(features.float(), dim=-1)
    return units @ units.transpose(1, 2)


def grid_neighbours(grid: Tensor) -> Tensor:
    """Return (B, N, N) booleans: are two tokens among each other's 8 neighbours in the same image and tile?

    Args:
        grid: (B, N, 4) integer coordinates: image, tile, row, column.
    """
    image, tile, row, column = grid.int().unbind(dim=2)
    # Tiles are stacked into one tall grid with a gap of one row, so that one distance answers for all four axes.
    height, n_tiles = (axis.amax(dim=1, keepdim=True) + 1 for axis in (row, tile))
    row = row + (image * n_tiles + tile) * (height + 1)
    return torch.maximum(_apart(row), _apart(column)) == 1  # the chessboard distance


def _apart(line: Tensor) -> Tensor:
    """Return (B, N, N) absolute differences of (B, N) integers."""
    return (line.unsqueeze(2) - line.unsqueeze(1)).abs_()
