"""Greedy MAP of a determinantal point process: the subset whose kernel matrix has the largest determinant."""

from __future__ import annotations

import torch
from torch import Tensor

from methods.checks import require_finite
from methods.select.ranking import ranking, rows_of

#: A token of which less than this share is new to the picks is in their span: what is left is rounding of fp32.
SPANNED = 1e-5


def dpp_map(similarity: Tensor, quality: Tensor, n_keep: int) -> Tensor:
    """Return (B, n_keep) ascending indices that greedily maximise det of diag(quality) similarity diag(quality).

    With s_j what is left of similarity[j, j] after projecting token j onto the picks so far (one row of a Cholesky
    factor for each pick), the next pick maximises quality_j^2 s_j; equal values go to the lower index. The factor is
    that of the similarity, not of the kernel: the picks are the same, and s_j says by itself when a token lies in the
    span of the picks, however small its quality. Once all tokens do (more are asked for than the rank), those of the
    highest quality fill the rest, so that the count is exact and nothing is chosen by rounding noise.

    Args:
        similarity: (B, N, N) symmetric and positive semidefinite, at most 1 on the diagonal.
        quality: (B, N), not negative.
        n_keep: how many to keep, 1 to N.

    Raises:
        MethodError: a quality or a diagonal entry is NaN or infinite.

    Cost: O(n_keep^2 N) and a factor of n_keep N numbers, in one Python loop of n_keep steps; the device never waits.
    """
    order = ranking(quality)
    n_rows, n_tokens = quality.shape
    left = require_finite(similarity.diagonal(dim1=1, dim2=2), "similarities").clone()
    weight = quality.square()
    rows = rows_of(order)
    factor = similarity.new_zeros(n_rows, n_keep, n_tokens)
    kept = torch.zeros_like(order, dtype=torch.bool)
    for step in range(n_keep):
        gain = (weight * left).masked_fill_(kept | (left <= SPANNED), 0)
        pick = gain.argmax(dim=1, keepdim=True)  # argmax returns the first of equal maxima
        # A gain of 0 means that nothing is left to choose: then no token is kept here.
        kept.scatter_(1, pick, (gain.gather(1, pick) > 0) | kept.gather(1, pick))
        known = factor[:, :step]
        shared = factor[rows, :step, pick] @ known  # (B, 1, N)
        scale = left.gather(1, pick).clamp(min=SPANNED).rsqrt()
        new = (similarity[rows, pick] - shared).squeeze(1) * scale
        factor[:, step] = new
        left -= new.square()
    place = torch.arange(n_tokens, device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, place)
    filled = (rank + n_tokens * ~kept).argsort(dim=1)[:, :n_keep]
    return filled.sort(dim=1).values
