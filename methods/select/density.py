"""Density-peak clustering on the k nearest neighbours (DPC-kNN): centres are dense and far from denser points."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.methods.checks import require_finite
from espalier.methods.select.topk import ranking, rows_of, top


def squared_distances(points: Tensor) -> Tensor:
    """Return (B, M, M) squared Euclidean distances over D of (B, M, D) points, in fp32, 0 on the diagonal.

    From one product of centred points, never from an (M, M, D) tensor of differences. Cost: O(M^2 D).
    """
    centred = points.float() - points.float().mean(dim=1, keepdim=True)
    lengths = centred.square().sum(dim=2)
    products = lengths.unsqueeze(2) + lengths.unsqueeze(1) - 2 * centred @ centred.transpose(1, 2)
    # Rounding makes the product slightly asymmetric, which would decide between points that are equally dense.
    distances = (products + products.transpose(1, 2)).clamp_(min=0) / (2 * points.shape[2])
    distances.diagonal(dim1=1, dim2=2).zero_()
    return distances


def density_peaks(squared: Tensor, n_centres: int, n_near: int) -> Tensor:
    """Return (B, n_centres) ascending indices of the cluster centres.

        rho_i = exp(-mean of the n_near smallest d_ij^2, i itself included)
        delta_i = min d_ij over the denser j; for the densest point, the largest distance of all
        centres: the largest rho_i delta_i

    Of equally dense points the one with the lower index counts as denser. Centres are ranked by the logarithm of
    rho delta, which does not underflow where points lie far apart.

    Args:
        squared: (B, M, M) symmetric squared distances, 0 on the diagonal.
        n_centres: 1 to M.
        n_near: 1 to M.

    Raises:
        MethodError: a distance is NaN or infinite.

    Cost: O(M^2 log M), no Python loop.
    """
    require_finite(squared, "squared distances")
    log_rho = -squared.topk(n_near, dim=2, largest=False).values.mean(dim=2)
    order = ranking(log_rho)
    rank = order.argsort(dim=1)
    denser = rank.unsqueeze(1) < rank.unsqueeze(2)  # [i, j]: j is denser than i
    delta = torch.where(denser, squared, squared.amax(dim=(1, 2), keepdim=True)).amin(dim=2)
    # Coinciding points have delta 0; the floor keeps their logarithm finite and last.
    smallest = torch.finfo(delta.dtype).tiny
    return top(log_rho + 0.5 * delta.clamp(min=smallest).log(), n_centres)


def nearest_centre(closeness: Tensor, centres: Tensor) -> Tensor:
    """Return (B, M) which of the centres (B, C) each point joins: the closest, the first of equals; centres stay.

    Args:
        closeness: (B, M, M) larger is closer.
        centres: (B, C) ascending indices.
    """
    joined = closeness[rows_of(centres), centres].argmax(dim=1)
    centre_slots = torch.arange(centres.shape[1], device=centres.device).expand_as(centres)
    return joined.scatter(1, centres, centre_slots)
