"""The share of a page that is worth keeping, and the count that follows (RTPrune, ICML 2026, arXiv 2605.00392).

The paper removes r of a sample's tokens,

    (7)  phi = mean over i != j of cos(T_i, T_j)^power               power 2 in the authors' code
    (8)  rho = mean over the global view's patches of the share of pixels with Sobel gradient > tau
    (9)  r = phi (1 - rho)

of the picture in [-1, 1], (10) in BT.601 luma. Here the run states a ratio, which is met in the mean over samples:

    k = round(keep (1 - r) / typical),   at least 1, at most N;   all tokens where nothing is to be removed

with `typical` the mean of 1 - r over samples like these. A ratio of 1 - typical gives every sample the paper's own
count, up to rounding (the paper rounds down). To measure `typical` on other data, run once with typical=1 and any ratio
above 0: it is `kept` over `requested` of the row's site. If the ratio is so small that samples reach the upper bound N,
the mean falls short of it.
"""

from __future__ import annotations

import math

from torch import Tensor

from espalier.methods.base import MethodError, View
from espalier.methods.checks import read
from espalier.methods.select.similarity import cosine
from espalier.methods.select.sobel import edge_share


def own_share(view: View, power: int, tau: float, across_patches: bool) -> Tensor:
    """Return (B,) the shares 1 - r of a view with luma, at most 1. Cost: O(N^2 D), and the picture's pixels.

    Args:
        view: a global view shows all of the page.
        power: of the cosine in (7).
        tau: gradient above which a pixel is part of an edge.
        across_patches: whether gradients see the picture around their patch. The authors' code pads each patch with
            zeros: white paper then has edges at every patch's border, grey letterbox has none.
    """
    n_tokens = view.tokens.shape[1]
    powers = cosine(view.tokens).pow(power)
    pairs = powers.sum(dim=(1, 2)) - powers.diagonal(dim1=1, dim2=2).sum(dim=1)
    phi = pairs / max(1, n_tokens * (n_tokens - 1))
    density = edge_share(view.signals["luma"], tau, across_patches)
    overview = (view.grid[:, :, 1] == 0).float()
    rho = (density * overview).sum(dim=1) / overview.sum(dim=1).clamp(min=1)
    return (1 - phi * (1 - rho)).clamp(max=1)


def own_count(shares: Tensor, unit: float, n_tokens: int) -> int:
    """Return round(unit share), 1 to `n_tokens`, of the only row, or of rows that agree. One device synchronisation.

    Raises:
        MethodError: the counts of several rows differ, so that no one plan holds for them.
    """
    owns: list[float] = read(shares)[0].tolist()
    counts = {min(max(1, math.floor(unit * share + 0.5)), n_tokens) for share in owns}
    if len(counts) > 1:
        raise MethodError(f"ratio=dynamic decides one row at a time, and {len(owns)} rows differ")
    return counts.pop()
