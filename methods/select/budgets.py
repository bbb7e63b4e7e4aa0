"""Layer budgets of a cache: from the scores of each layer to whole numbers of entries with a given sum.

Each rule returns the share of every layer, real numbers with mean one; `entries` turns shares into counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from espalier.methods.checks import read

#: Halvings of the threshold's interval, PrefixKV.
HALVINGS = 60

#: PyramidKV: the mean divided by this is the budget of the last layer.
BETA = 20

#: Part of the largest share that a layer without a share counts as.
FAINT = 1e-9

#: Far above the error of a scale in doubles, far below the difference of two shares.
ROUNDING = 1e-6

#: Shares and remainders that differ by less are equal.
ALIKE = 1e-9


def uniform(scores: Sequence[Tensor], keep: float) -> Tensor:
    """Return the same share for every layer."""
    del keep
    return torch.ones(len(scores), dtype=torch.float64)


def pyramid(scores: Sequence[Tensor], keep: float, beta: float = BETA) -> Tensor:
    """Return shares that fall linearly from the first layer to the last: PyramidKV (arXiv 2406.02069).

    The last layer has keep / beta entries, the first 2 keep less that, or all there are where that is more than there
    are; real numbers, so that the mean is exact.
    """
    last = keep / beta
    first = 2 * keep - last
    n_entries = max(layer.shape[-1] for layer in scores)
    if first > n_entries:
        first = float(n_entries)
        last = 2 * keep - first
    return torch.linspace(first, last, len(scores), dtype=torch.float64) / keep


def strength(scores: Sequence[Tensor], keep: float) -> Tensor:
    """Return shares by how much attention a layer pays to all candidates: AirCache, equation (9)."""
    del keep
    return _mean_one(_strengths(scores))[0]


def skewness(scores: Sequence[Tensor], keep: float) -> Tensor:
    """Return shares by how unequal a layer's scores are: AirCache, equation (10).

    The sample skewness with the sample standard deviation; negative ones count as 0, and equal scores have none.
    """
    del keep
    return _mean_one(_skews(scores))[0]


def strength_and_skewness(scores: Sequence[Tensor], keep: float) -> Tensor:
    """Return the mean of both: AirCache, equation (11)."""
    del keep
    strengths, skews = _mean_one(_strengths(scores), _skews(scores))
    return (strengths + skews) / 2


def lorenz(scores: Sequence[Tensor], keep: float) -> Tensor:
    """Return the shares with which every layer retains the same part of its attention: PrefixKV (arXiv 2412.03409).

    A layer's candidates, the best first, make up a growing part of its total. The threshold on that part is halved in
    until the layers that reach it hold `keep` entries on average, or as close to it as whole entries come.
    """
    curves = lorenz_curves(scores)
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if float(reaching(curves, middle).mean()) > keep:
            high = middle
        else:
            low = middle
    return reaching(curves, low) / keep


def lorenz_curves(scores: Sequence[Tensor]) -> list[Tensor]:
    """Return on the host for each layer (N,) the part of its attention in its best 1, 2, ... N entries together."""
    curves = []
    for layer in scores:
        ranked = _shared(layer).sort(descending=True).values
        curves.append(ranked.cumsum(0) / ranked.sum().clamp(min=torch.finfo(ranked.dtype).tiny))
    return read(*curves)


def reaching(curves: Sequence[Tensor], threshold: float) -> Tensor:
    """Return (layers,) how many entries a layer needs for this part of its attention, at least one."""
    counts = [min(int((curve < threshold).sum()) + 1, len(curve)) for curve in curves]
    return torch.tensor(counts, dtype=torch.float64)


RULES: Mapping[str, Callable[[Sequence[Tensor], float], Tensor]] = {
    "uniform": uniform,
    "pyramid": pyramid,
    "lorenz": lorenz,
    "strength": strength,
    "skewness": skewness,
    "strength_and_skewness": strength_and_skewness,
}


def entries(shares: Tensor, total: int, limits: Sequence[int]) -> Tensor:
    """Return (layers,) whole numbers in proportion to the shares with sum `total`, each from 1 to the layer's entries.

    Entries that a bound takes from a layer go to the others in proportion to their shares; the largest remainders get
    the entries lost to rounding, the first layer first among equals. Shares that differ in their last bits are equal.

    Args:
        shares: (layers,), none negative.
        total: entries of all layers together.
        limits: entries that each layer has.

    Raises:
        ValueError: fewer entries than layers, or more than there are.
    """
    if not len(shares) <= total <= sum(limits):
        raise ValueError(f"{total} entries for {len(shares)} layers that have {sum(limits)}")
    wanted = _bounded(_levelled(shares.double().cpu()), float(total), torch.tensor(limits).double())
    # A number that is whole up to the last bits of the scale counts as whole.
    counts = (wanted + ROUNDING).floor()
    missing = total - int(counts.sum())
    order = _levelled(wanted - counts).argsort(descending=True, stable=True)
    counts[order[:missing]] += 1
    return counts.long()


def _levelled(values: Tensor) -> Tensor:
    """Return values (N,) in which those that differ by rounding alone become the smallest of them."""
    ranked, order = values.sort()
    leads = ranked.diff(prepend=ranked[:1] - 1) > ALIKE
    return torch.empty_like(values).scatter(0, order, ranked[leads][leads.cumsum(0) - 1])


def _bounded(shares: Tensor, total: float, limits: Tensor) -> Tensor:
    """Return (layers,) real numbers from 1 to `limits`, in proportion to the shares wherever no bound holds."""
    # A layer without a share gets the remainder when all others are full.
    shares = shares.clamp(min=FAINT * float(shares.max()))
    # The sum of bounded shares grows with their scale, which is halved in between none and all at the upper bound.
    low, high = 0.0, float((limits / shares).max())
    while (middle := (low + high) / 2) not in (low, high):
        enough = float((shares * middle).clamp(min=1).minimum(limits).sum()) >= total
        low, high = (low, middle) if enough else (middle, high)
    return (shares * low).clamp(min=1).minimum(limits)


def skew(values: Tensor) -> Tensor:
    """Return the sample skewness of values (N,): 0 of fewer than three, and of equal ones."""
    n = len(values)
    if n < 3:
        return values.new_zeros(())
    gaps = values - values.mean()
    spread = gaps.square().sum().div(n - 1).sqrt()
    # Equal values differ by rounding alone.
    equal = spread <= values.abs().max() * n * torch.finfo(values.dtype).eps
    return torch.where(equal, 0, n / ((n - 1) * (n - 2)) * (gaps / spread).pow(3).sum())


def _shared(layer: Tensor) -> Tensor:
    """Return (N,) doubles: the mean over heads of a layer's scores (H, N)."""
    return layer.double().mean(dim=0)


def _strengths(scores: Sequence[Tensor]) -> Tensor:
    return torch.stack([_shared(layer).sum() for layer in scores])


def _skews(scores: Sequence[Tensor]) -> Tensor:
    return torch.stack([skew(_shared(layer)) for layer in scores]).clamp(min=0)


def _mean_one(*values: Tensor) -> list[Tensor]:
    """Return values (layers,) on the host, each scaled to mean one; ones if all are zero."""
    return [torch.where(part.mean() > 0, part / part.mean(), 1) for part in read(*values)]
