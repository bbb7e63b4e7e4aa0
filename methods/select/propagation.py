"""Propagation on a graph of tokens (GTP-ViT, Xu et al., WACV 2024, arXiv 2311.03035)."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.methods.select.nearest import nearest
from espalier.methods.select.similarity import grid_neighbours


def mixed_graph(similarity: Tensor, grid: Tensor, k: int) -> Tensor:
    """Return (B, N, N) booleans: the tokens (columns) from which each token (rows) receives.

    A token receives from its 8 neighbours in the grid of its tile and from the k tokens most similar to it. As in the
    released code the second relation is directed.

    Args:
        similarity: (B, N, N) finite numbers; the diagonal is ignored.
        grid: (B, N, 4) coordinates.
        k: how many semantic neighbours.

    Raises:
        MethodError: a similarity is NaN or infinite.

    Cost: O(N^2 log k).
    """
    tokens = torch.arange(similarity.shape[1], device=similarity.device).expand_as(similarity[:, 0])
    return nearest(similarity, tokens, k) | grid_neighbours(grid)


def normalised(graph: Tensor) -> Tensor:
    """Return D^-1/2 A D^-1/2 (B, N, N) in fp32 of a graph A, D the sums of its rows; 0 for a token without an edge.

    Cost: O(N^2).
    """
    edges = graph.float()
    scale = edges.sum(dim=2).clamp(min=1).rsqrt()
    return edges * scale.unsqueeze(2) * scale.unsqueeze(1)
