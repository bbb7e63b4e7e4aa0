"""Max-min diversity by farthest-first traversal."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.methods.checks import require_finite
from espalier.methods.select.cosines import Cosines

#: Cosine distances below this are rounding of fp32: such tokens count as duplicates, and the lower index goes first.
DUPLICATE = 1e-6


def farthest_first(cosines: Cosines, n_keep: int) -> Tensor:
    """Return (B, n_keep) ascending indices that greedily maximise the smallest distance 1 - cos between kept tokens.

    The first pick is the token with the largest distance to its nearest other token; each next pick is the token
    farthest from all picks so far. Picks are never repeated. Equal distances go to the lower index; so do duplicates,
    although their distances to a third token may differ by the rounding of a product.

    Args:
        cosines: of N tokens.
        n_keep: how many to keep, 1 to N.

    Raises:
        MethodError: a cosine is NaN or infinite.

    Cost: `Cosines.nearest` for the first pick, then `n_keep` steps of one row and eight operations on N numbers.
    """
    isolation = _distance(require_finite(cosines.nearest(), "cosines"))
    pick = isolation.argmax(dim=1, keepdim=True)  # argmax returns the first of equal maxima
    gap = torch.full_like(isolation, torch.inf)
    taken = torch.zeros_like(isolation)
    picks = pick.repeat(1, n_keep)
    for step in range(n_keep):
        far = _distance(cosines.row(pick, gap)).scatter_(1, pick, DUPLICATE)
        # The pick itself, or a duplicate of it that has a lower index.
        first = (far + taken).argmin(dim=1, keepdim=True)
        picks[:, step : step + 1] = first
        taken.scatter_(1, first, torch.inf)
        torch.minimum(gap, far, out=gap).scatter_(1, first, -torch.inf)
        pick = gap.argmax(dim=1, keepdim=True)
    return picks.sort(dim=1).values


def _distance(cosine: Tensor) -> Tensor:
    """Return 1 - cos, at least DUPLICATE, which all duplicates share."""
    return torch.rsub(cosine, 1).clamp_(min=DUPLICATE)
