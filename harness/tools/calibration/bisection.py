"""FitPrune's schemes in plain numbers: what images lost at each alpha, what that saves, which alpha a target takes.

FLOPs are those of the released code: of n visual tokens that enter a layer and k that stay after its attention, with
width d and feed-forward width m, 3 n d^2 + 2 n^2 d + k d^2 + 3 k d m. Words are not counted, and neither is what visual
tokens and words pay each other: so counted, and not with words, the released schedules save the share in their name.
Budgets of a run are another matter: they are counted as for every method (harness/cost/budget.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from espalier.harness.cost.facts import StackFacts

#: Width of the interval of alphas at which the bisection ends.
WIDTH = 0.01
#: Decimals of a share.
DECIMALS = 6


@dataclass(frozen=True)
class Trace:
    """One image at one alpha: the visual tokens that entered each decoder layer."""

    entering: tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """What one alpha amounts to.

    Attributes:
        alpha: share of the attention that each layer may lose.
        reached: whether the target was met.
        removed: visual tokens removed inside each layer, mean over images rounded down, none once the target is met.
        flops: FLOPs over those of all visual tokens.
    """

    alpha: float
    reached: bool
    removed: tuple[int, ...]
    flops: float


def shares(by_alpha: Sequence[Sequence[Trace]]) -> tuple[tuple[float, ...], ...]:
    """Return the rows of `FitPrune.scheme`: mean shares left after each layer but the last.

    More may be left at a later layer where more went earlier, since attention has moved by then; a family of schedules
    must not rise with alpha, so each row is at most the row before.

    Args:
        by_alpha: for each alpha, ascending, the traces of all images.
    """
    rows: list[tuple[float, ...]] = []
    for traces in by_alpha:
        n_sites = len(traces[0].entering) - 1
        above = rows[-1] if rows else (1.0,) * n_sites
        kept = [
            fmean(trace.entering[site + 1] / trace.entering[0] for trace in traces)
            for site in range(n_sites)
        ]
        pairs = zip(above, kept, strict=True)
        rows.append(tuple(min(high, round(low, DECIMALS)) for high, low in pairs))
    return tuple(rows)


def smallest_reaching(
    ratio: float, traces_at: Callable[[float], Sequence[Trace]], stack: StackFacts
) -> tuple[Fit, Fit]:
    """Bisect alpha from 0 to 1; return the smallest that saves `ratio` of the FLOPs, and the last tried.

    The last is printed by the released code, reached or not. If nothing reaches the target, the first is alpha = 1.

    Args:
        ratio: share of the visual tokens' FLOPs to be saved, mean over images.
        traces_at: gives the traces of all images at an alpha.
        stack: sizes of the decoder.
    """
    low, high, last = 0.0, 1.0, 1.0
    while high - low > WIDTH:
        last = (low + high) / 2
        if fit(last, ratio, traces_at(last), stack).reached:
            high = last
        else:
            low = last
    best, tried = (fit(alpha, ratio, traces_at(alpha), stack) for alpha in (high, last))
    return best, tried


def fit(alpha: float, ratio: float, traces: Sequence[Trace], stack: StackFacts) -> Fit:
    """Return the share removed at `alpha`, up to the first layer before which the forecast meets the target."""
    depth = len(traces[0].entering)
    full = sum(forecast(trace, 0, stack) for trace in traces)
    spent = [sum(forecast(trace, layer, stack) for trace in traces) for layer in range(depth)]
    stop = next((layer for layer in range(depth) if spent[layer] <= (1 - ratio) * full), None)
    end = depth - 1 if stop is None else stop
    going = [sum(a - b for a, b in _lost(traces, layer)) // len(traces) for layer in range(end)]
    removed = (*going, *[0] * (depth - end))
    return Fit(alpha, stop is not None, removed, spent[end] / full)


def _lost(traces: Sequence[Trace], layer: int) -> list[tuple[int, int]]:
    return [(trace.entering[layer], trace.entering[layer + 1]) for trace in traces]


def forecast(trace: Trace, layer: int, stack: StackFacts) -> int:
    """Return the FLOPs of all layers if nothing more went from `layer` on."""
    counts = trace.entering[: layer + 1]
    used = sum(layer_flops(n, k, stack) for n, k in pairwise(counts))
    return used + (len(trace.entering) - layer) * layer_flops(counts[-1], counts[-1], stack)


def layer_flops(entering: int, staying: int, stack: StackFacts) -> int:
    """Return the FLOPs of a layer that `entering` visual tokens attend in and `staying` of them leave."""
    width, inner = stack.hidden, stack.intermediate
    attention = 3 * entering * width**2 + 2 * entering**2 * width
    return attention + staying * width**2 + 3 * staying * width * inner
