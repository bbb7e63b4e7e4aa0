"""Greedy MAP of a determinantal point process: the subset with the largest determinant of its kernel matrix."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import threshold

from espalier.methods.checks import require_finite
from espalier.methods.select.cosines import Cosines
from espalier.methods.select.topk import Chosen, filled_up, ranking

#: A token with a smaller residual than this is in the span of the picks: the residual is rounding of fp32.
SPANNED = 1e-5


def dpp_map(similarity: Cosines, quality: Tensor, n_keep: int) -> Chosen:
    """Return n_keep tokens that greedily maximise det of diag(quality) similarity diag(quality).

    With s_j the residual of similarity[j, j] after projecting token j onto the picks so far (one row of a Cholesky
    factor for each pick), the next pick maximises quality_j^2 s_j; equal values go to the lower index. The factor is
    that of the similarity, not of the kernel: the picks are the same, and s_j alone shows when a token lies in the
    span of the picks, however small its quality. Once all tokens do (the count exceeds the rank), those of the
    highest quality fill the rest, so that the count is exact and nothing is chosen by rounding noise.

    Args:
        similarity: of N tokens.
        quality: (B, N), not negative.
        n_keep: how many to keep, 1 to N.

    Raises:
        MethodError: a quality or a diagonal entry is NaN or infinite.

    Cost: n_keep rows of similarities, n_keep^2 N / 2 products and a factor of n_keep N numbers that each step reads as
    far as it is filled, in one Python loop of n_keep steps. With n_keep in proportion to N that grows with N^3.
    """
    order = ranking(quality)
    n_rows, n_tokens = quality.shape
    weight = quality.square()
    # The residuals, then the rows of the factor: one step reads a column of both.
    factor = quality.new_zeros(n_rows, 1 + n_keep, n_tokens)
    factor[:, 0] = require_finite(similarity.diagonal(), "similarities")
    residual, *factor_rows = factor.unbind(dim=1)
    picks, gains = order.new_empty(n_rows, n_keep), quality.new_empty(n_rows, n_keep)
    pairs = zip(gains.split(1, dim=1), picks.split(1, dim=1), strict=True)
    for step, (best, pick) in enumerate(pairs):
        # Tokens in the span count as 0, including the picks themselves; max returns the first of equal maxima.
        gain = threshold(residual, SPANNED, 0).mul_(weight)
        torch.max(gain, dim=1, keepdim=True, out=(best, pick))
        new, index = similarity.row(pick, gain).unsqueeze(1), pick.unsqueeze(1)
        column = factor[:, : 1 + step].gather(2, index.expand(-1, 1 + step, -1)).transpose(1, 2)
        new.baddbmm_(column[:, :, 1:], factor[:, 1 : 1 + step], alpha=-1)
        # Without a candidate no number follows, and none is needed.
        row = torch.mul(new.squeeze(1), column[:, :, 0].rsqrt_(), out=factor_rows[step])
        residual.addcmul_(row, row, value=-1)
    # A gain of 0 means that no candidate remained: then no token is kept here.
    chosen = torch.zeros_like(order).scatter_reduce_(1, picks, (gains > 0).long(), "amax")
    return filled_up(chosen.bool(), order, n_keep)
