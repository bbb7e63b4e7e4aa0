"""Pairwise cosine similarity, and the neighbourhood of the patch grid."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize

#: Rows of one block of the upper triangle: few enough to stay in the cache, and enough for a product at full speed.
BLOCK = 192
#: Blocks have at least this many rows and columns if there are as many tokens: thinner products are slower, and round
#: differently with some libraries.
FEWEST, NARROWEST = 16, 256


def unit(features: Tensor) -> Tensor:
    """Return the features (B, N, D) at length 1, in fp32; a zero vector stays one. Cost: O(N D)."""
    return normalize(features.float(), dim=-1)


def cosine(features: Tensor) -> Tensor:
    """Return (B, N, N) cosine similarities of (B, N, D) features, computed in fp32, exactly symmetric.

    A zero vector has similarity 0 to everything, itself included; otherwise the diagonal is 1.

    Cost: O(N^2 D / 2), 4 N^2 bytes a row: only the upper triangle is multiplied out.
    """
    return cosine_of_units(unit(features))


def cosine_of_units(units: Tensor) -> Tensor:
    """Return `cosine` of features (B, N, D) that `unit` returned."""
    n_rows, n_tokens, _ = units.shape
    matrix = units.new_empty(n_rows, n_tokens, n_tokens)
    for row, column, block in upper_blocks(units):
        end = row + block.shape[1]
        matrix[:, row:end, column:] = block
        matrix[:, column:, row:end] = block.transpose(1, 2)
        # A library may round x . y and y . x differently, so only one half of the square on the diagonal is used.
        upper = block[:, :, row - column : end - column].triu()
        matrix[:, row:end, row:end] = upper + upper.triu(1).transpose(1, 2)
    return matrix


def upper_blocks(units: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the upper triangle of units @ units^T (B, N, N) in blocks: their first row, first column, and values.

    A block reaches from its first column, which is not after its first row, to the last column; the last blocks may
    repeat entries. The diagonal is rounded to 1, or 0 for a zero vector, so that its rounding error has no effect.

    Cost: O(N^2 D / 2) for all blocks, and the memory of one.
    """
    n_tokens = units.shape[1]
    across = units.transpose(1, 2)
    for start in range(0, n_tokens, BLOCK):
        row, column = (max(0, min(start, n_tokens - minimum)) for minimum in (FEWEST, NARROWEST))
        block = units[:, row : row + BLOCK] @ across[:, :, column:]
        block.diagonal(row - column, dim1=1, dim2=2).round_()
        yield row, column, block


def grid_neighbours(grid: Tensor) -> Tensor:
    """Return (B, N, N) booleans: are two tokens among each other's 8 neighbours in the same image and tile?

    Args:
        grid: (B, N, 4) integer coordinates: image, tile, row, column.
    """
    board = board_of(grid)
    return neighbours(board, torch.arange(grid.shape[1], device=grid.device).expand_as(board[0]))


def board_of(grid: Tensor) -> Tensor:
    """Return (2, B, N) row and column of each token, all tiles stacked into one tall board with gaps of one row."""
    image, tile, row, column = grid.int().unbind(dim=2)
    height, n_tiles = (axis.amax(dim=1, keepdim=True) + 1 for axis in (row, tile))
    return torch.stack([row + (image * n_tiles + tile) * (height + 1), column])


def neighbours(board: Tensor, indices: Tensor) -> Tensor:
    """Return (B, K, N) booleans: which tokens of a board (2, B, N) are among the 8 neighbours of those at `indices`."""
    centres = board.gather(2, indices.expand(2, -1, -1)).unsqueeze(3)
    down, right = (centres - board.unsqueeze(2)).abs_()
    return torch.maximum(down, right) == 1  # the chessboard distance
