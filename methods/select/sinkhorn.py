"""Entropy-regularised optimal transport with a dustbin on either side (Sarlin et al., 2020; Cuturi, 2013)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def transport(scores: Tensor, dustbin: float, iters: int) -> Tensor:
    """Return the transport plan P (B, M, J) of M takers and J givers, without the dustbins' row and column.

    With S the scores, `dustbin` in one more row and column, and marginals a = [1, ..., 1, J], b = [1, ..., 1, M]:

        x_i = a_i / sum_j exp(S_ij) y_j,   y_j = b_j / sum_i exp(S_ij) x_i,   `iters` times from y = 1
        P_ij = x_i exp(S_ij) y_j

    In exact arithmetic every iterate equals that of the updates on logarithms, with duals log x and log y; there each
    step takes an exponential of the whole matrix, here one product of a matrix and a vector. Nothing can overflow:
    scores are cosines and `dustbin` is of their order, so that all entries of exp(S) lie within a few factors of e
    and no sum is zero, whatever the tokens are.

    Args:
        scores: (B, M, J) finite numbers of the order of 1, M at least 1.
        dustbin: score of an unmatched token.
        iters: at least 1.

    Cost: O(iters M J) and `iters` rounds of four small operations, without device synchronisation.
    """
    n_takers, n_givers = scores.shape[1:]
    if n_givers == 0:
        return scores
    accumulator = torch.promote_types(scores.dtype, torch.float32)
    kernel = pad(scores.to(accumulator), (0, 1, 0, 1), value=dustbin).exp_()
    turned = kernel.transpose(1, 2)
    takers = kernel.new_ones(n_takers + 1, 1)
    givers = kernel.new_ones(n_givers + 1, 1)
    takers[-1], givers[-1] = n_givers, n_takers
    y = torch.ones_like(givers).expand(len(scores), -1, -1)
    for _ in range(iters):
        x = takers / (kernel @ y)
        y = givers / (turned @ x)
    plan: Tensor = x * kernel * y.transpose(1, 2)
    return plan[:, :-1, :-1]
