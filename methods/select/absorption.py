"""Weights (B, K, J) by which J dropped tokens merge into K kept slots."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.methods.select.cells import distances_from
from espalier.methods.select.density import density_peaks, nearest_centre, squared_distances
from espalier.methods.select.similarity import unit
from espalier.methods.select.tiles import Tiles
from espalier.methods.select.topk import ranking, rows_of


def mean_of_joined(joined: Tensor, n_kept: int) -> Tensor:
    """Return weights by which every slot gets the mean of the tokens that joined it, 0 for a slot without any.

    Args:
        joined: (B, J) the slot of each token, -1 for none.
        n_kept: K.

    Cost: O(K J).
    """
    slots = torch.arange(n_kept, device=joined.device)
    member = (joined.unsqueeze(1) == slots.view(1, -1, 1)).float()
    return member / member.sum(dim=2, keepdim=True).clamp(min=1)


def most_similar(similarity: Tensor) -> Tensor:
    """Return weights by which each token joins the most similar kept one (VisionZip), the first of equals.

    Args:
        similarity: (B, K, J) of kept and dropped tokens.

    Cost: O(K J).
    """
    return mean_of_joined(similarity.argmax(dim=1), similarity.shape[1])


def clusters(tokens: Tensor, kept: Tensor, scores: Tensor, share: float, size: int) -> Tensor:
    """Return weights by which the best dropped tokens merge as clusters (SparseVLM's recycling).

    The best floor(share J) + 1 of the J dropped tokens form floor(that / size) + 1 clusters: density peaks by Euclidean
    distance, then means. Each cluster joins the kept token with the highest cosine to its mean; a kept token gets the
    mean of the clusters that joined it.

    Args:
        tokens: (B, J, D) dropped tokens, J at least 1.
        kept: (B, K, D) kept tokens.
        scores: (B, J) priority of recycling a dropped token.
        share: share of the dropped tokens that is recycled, 0 to 1.
        size: approximate number of tokens in a cluster, at least 1.

    Cost: O(R^2 (D + log R)) for R recycled tokens.
    """
    n_dropped = tokens.shape[1]
    # The small term keeps 0.3 * 10 from becoming 2.999...
    n_recycled = min(int(share * n_dropped + 1e-9) + 1, n_dropped)
    n_clusters = min(n_recycled // size + 1, n_recycled)
    pool = ranking(scores)[:, :n_recycled].sort(dim=1).values
    points = tokens.float()[rows_of(pool), pool]
    squared = squared_distances(points)
    centres = density_peaks(squared, n_clusters, n_clusters)
    weights = mean_of_joined(nearest_centre(-squared, centres), n_clusters)
    flow = most_similar(unit(kept) @ unit(weights @ points).transpose(1, 2)) @ weights
    weights_of_all = flow.new_zeros(*flow.shape[:2], n_dropped)
    return weights_of_all.scatter(2, pool.unsqueeze(1).expand_as(flow), flow)


def nearby(similarity: Tensor, grid: Tensor, kept: Tensor, dropped: Tensor, area: float) -> Tensor:
    """Return weights max(cos, 0) (1 - min(1, distance / R)), each slot's scaled to a sum of 1 (NUWA's aggregation).

    R^2 is `area` of the tile's height times width; tokens of another image or tile weigh 0, and a slot without any
    weight gets nothing.

    Args:
        similarity: (B, K, J) cosines of kept and dropped tokens.
        grid: (B, N, 4) coordinates of all tokens.
        kept: (B, K) their indices.
        dropped: (B, J) likewise.
        area: more than 0.

    Cost: O(K N).
    """
    tiles = Tiles.of(grid)
    radius = (area * tiles.of_token(tiles.height * tiles.width).float()).sqrt().gather(1, kept)
    distances = distances_from(grid, kept).gather(2, dropped.unsqueeze(1).expand_as(similarity))
    near = 1 - (distances / radius.unsqueeze(2)).clamp(max=1)
    weight = similarity.clamp(min=0) * near
    total = weight.sum(dim=2, keepdim=True)
    return weight / torch.where(total > 0, total, 1)
