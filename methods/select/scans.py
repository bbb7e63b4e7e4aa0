"""Two scans of a crop, of its windows and of all of it, and what their tokens take in: VScan (arXiv 2505.22654)."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.methods.checks import read, require_finite
from espalier.methods.select.groups import Groups
from espalier.methods.select.quotas import apportion, best_of_groups
from espalier.methods.select.similarity import unit
from espalier.methods.select.topk import rows_of


def scanned(
    groups: Groups,
    grid: Tensor,
    attention: tuple[Tensor, Tensor],
    share: Tensor,
    local: float,
    side: int,
) -> Tensor:
    """Return (R, M) booleans: the tokens of both scans, a row for each crop.

    Args:
        groups: the tokens of the crops.
        grid: (B, N, 4) coordinates of the tokens.
        attention: (B, N) by which the local scan ranks, and the global one.
        share: (R, 1) tokens of each crop that both scans choose.
        local: share of them that is local: the same number in each window.
        side: patches along the edge of a window.
    """
    shallow, deep = map(groups.rows, attention)
    valid = groups.valid.flatten(0, 1)
    row, column = (groups.rows(grid[:, :, axis]).long() for axis in (2, 3))
    down, right = ((place - place[:, :1]) // side for place in (row, column))
    extents = read(*((place * valid).max() + 1 for place in (down, right)))
    n_down, n_right = map(int, extents)
    # Padding has a window of its own, which gets nothing.
    window = torch.where(valid, down * n_right + right, n_down * n_right)
    sizes = torch.zeros_like(window[:, :1]).expand(-1, n_down * n_right + 1)
    sizes = sizes.scatter_add(1, window, valid.long())
    n_local = (share * local + 1e-9).long()
    chosen = best_of_groups(shallow, window, apportion(sizes, sizes, n_local))
    candidates = deep.masked_fill(chosen | ~valid, -1.0)
    return chosen | best_of_groups(candidates, torch.zeros_like(window), share - n_local)


def nearest_of_crop(tokens: Tensor, crop: Tensor, index: Tensor) -> Tensor:
    """Return (B, N) the place in `index` (B, K) of the token of the same crop (B, N) with the highest cosine.

    Raises:
        PlanError: a token is NaN or infinite.
    """
    units = unit(require_finite(tokens, "tokens"))
    similarity = units @ units[rows_of(index), index].transpose(1, 2)
    within = crop.unsqueeze(2) == crop.gather(1, index).unsqueeze(1)
    return similarity.masked_fill_(~within, -2).argmax(dim=2)
