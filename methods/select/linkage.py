"""Connected components of the pairs above a likeness, for all thresholds at once or over frames in turn."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from espalier.methods.select.topk import ranking


class Tree(NamedTuple):
    """Spanning trees that join the points of each row by their likest pairs.

    The links above a threshold connect the same points as all pairs above it.

    Attributes:
        parent: (R, M) point that each point is linked to; the first point is linked to itself.
        likeness: (R, M) of the link, -inf for the first point.
    """

    parent: Tensor
    likeness: Tensor

    def roots(self, linked: Tensor) -> Tensor:
        """Return (R, M) for each point the same point of its component, where only the links in `linked` (R, M) hold.

        Cost: O(R M log M).
        """
        points = torch.arange(linked.shape[1], device=linked.device).expand_as(linked)
        root = torch.where(linked, self.parent, points)
        for _ in range((linked.shape[1] - 1).bit_length()):
            root = root.gather(1, root)
        return root

    def likest(self, count: int) -> Tensor:
        """Return (R, M) booleans: the `count` likest links of all rows, equal ones from the front."""
        order = ranking(self.likeness.flatten().nan_to_num(neginf=-2).unsqueeze(0))[0, :count]
        links = torch.zeros(self.likeness.numel(), dtype=torch.bool, device=order.device)
        return links.index_fill(0, order, True).view_as(self.likeness)


def likest_tree(similarity: Tensor) -> Tree:
    """Return the trees with the highest sum of symmetric similarities (R, M, M), by Prim's algorithm.

    Cost: M steps of O(R M), no device synchronisation.
    """
    best = similarity[:, 0].clone()
    parent = torch.zeros_like(best, dtype=torch.long)
    likeness = torch.full_like(best, -torch.inf)
    inside = torch.zeros_like(best, dtype=torch.bool)
    inside[:, 0] = True
    row = torch.arange(len(similarity), device=best.device)
    for _ in range(best.shape[1] - 1):
        value, point = best.masked_fill(inside, -torch.inf).max(dim=1)
        likeness[row, point], inside[row, point] = value, True
        joins = similarity[row, point]
        nearer = (joins > best) & ~inside
        best = torch.where(nearer, joins, best)
        parent = torch.where(nearer, point.unsqueeze(1), parent)
    return Tree(parent, likeness)


class ConnectedParts(NamedTuple):
    """A partition of M points in K components.

    Attributes:
        places: (K,) ascending, the point that leads each.
        label: (M,) number of each point's component, in the order of `places`.
        weight: (M,) of each point in the mean of its component.
    """

    places: Tensor
    label: Tensor
    weight: Tensor

    @classmethod
    def of(cls, root: Tensor, degree: Tensor) -> ConnectedParts:
        """Read off roots (M,) as in `Tree`; the point with the highest degree (M,) leads, the first of equals."""
        order = ranking(degree.float().unsqueeze(0))[0]
        rank = order.argsort()
        first = torch.full_like(rank, len(rank)).scatter_reduce(0, root, rank, "amin")[root]
        leads = first == rank
        label = (leads.cumsum(dim=0) - 1)[order[first]]
        weight = 1 / torch.bincount(label)[label].float()
        return cls(leads.nonzero().squeeze(1), label, weight)

    def joined(self, later: ConnectedParts) -> ConnectedParts:
        """Return the components of points, from those of their components: means of means."""
        weight = self.weight * later.weight[self.label]
        return ConnectedParts(self.places[later.places], later.label[self.label], weight)

    def compared(self, products: Tensor) -> tuple[Tensor, Tensor]:
        """Return (K, K) cosines of the means, and (K, M) of the means with points, times the lengths of the points.

        Args:
            products: (M, M) of the points.

        Cost: O(M^2).
        """
        count, weight = len(self.places), self.weight.unsqueeze(1)
        sums = products.new_zeros(count, len(products))
        sums.index_add_(0, self.label, products * weight)
        means = products.new_zeros(count, count).index_add_(0, self.label, sums.T * weight)
        lengths = means.diagonal().sqrt().clamp(min=torch.finfo(means.dtype).tiny).unsqueeze(1)
        return means / lengths / lengths.T, sums / lengths


def count_components(linked: Tensor) -> int:
    """Return the number of components of the points that a symmetric table (M, M) links.

    Cost: O(M^2) a pass, each with one device synchronisation; a few passes, up to the longest path in the worst case.
    """
    label = torch.arange(len(linked), device=linked.device)
    while True:
        lowest = torch.where(linked, label.int(), len(linked)).amin(dim=1).long().minimum(label)
        lowest = lowest[lowest]
        if torch.equal(lowest, label):
            return len(label.unique())
        label = lowest


def first_labels(first: Tensor, second: Tensor, count: int) -> Tensor:
    """Return (count,) the label of each point, the lowest point that pairs (P,) lead to, `first` below `second`.

    As in STTM's code (methods/sttm.py), passes end when every label is its own label: of a point that is the second of
    two pairs, it may then share only one first point's label. One device synchronisation in each pass.
    """
    label = torch.arange(count, device=first.device)
    while True:
        lowest = label[first].minimum(label[second])
        label = label.scatter_reduce(0, first, lowest, "amin")
        label = label.scatter_reduce(0, second, lowest, "amin")
        label = label[label]
        if torch.equal(label, label[label]):
            return label


def likest_pairs(units: Tensor, corner: Tensor, alike: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Return earlier and later cells (P,) of the most similar pairs, one for each later cell, that leave `keep` cells.

    Args:
        units: (N, D) of the cells, at their corners.
        corner: (N,) the cell of each token.
        alike: (N - n,) cosine of each token's cell with the one before, from the second frame on.
        keep: cells to leave.
    """
    size, number = len(corner) - len(alike), torch.arange(len(corner), device=corner.device)
    before, after, cell = corner[: len(alike)], corner[size:], (corner == number).nonzero()[:, 0]
    opening = cell[cell < size]
    likest = alike.new_full((len(corner),), -9.0)  # below all: the first cell has no pair
    # 4 less than a cosine: pairs inside the first frame come after all pairs of two frames.
    likest[opening[1:]] = (units[opening[1:]] * units[opening[:-1]]).sum(dim=1) - 4
    likest.scatter_reduce_(0, after, alike, "amax")
    earlier = torch.full_like(number, len(corner))
    earlier[opening[1:]] = opening[:-1]
    earlier.scatter_reduce_(
        0, after, torch.where(alike == likest[after], before, len(corner)), "amin"
    )
    joins = cell[ranking(likest[cell].unsqueeze(0))[0, : len(cell) - keep]]
    return earlier[joins], joins
