"""The passes that fit FitPrune (arXiv 2409.10197): masses without pruning, then the tokens that each alpha removes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget
from espalier.harness.cost.facts import StackFacts
from espalier.harness.tools.calibration.calibration_images import ImageDigest, question
from espalier.methods.base import Plan, View
from espalier.methods.fitprune import FitPrune, attentions
from espalier.methods.select.topk import ranking

if TYPE_CHECKING:
    from PIL.Image import Image

    from espalier.harness.engine.record import SampleRecord
    from espalier.harness.models.adapter import Adapter

#: Width of the interval of alphas at which the bisection ends.
WIDTH = 0.01
#: Decimals of a share.
DECIMALS = 6


#: One image at one alpha: the visual tokens that entered each decoder layer.
Trace = tuple[int, ...]


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
        n_sites = len(traces[0]) - 1
        above = rows[-1] if rows else (1.0,) * n_sites
        kept = [fmean(trace[site + 1] / trace[0] for trace in traces) for site in range(n_sites)]
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
    depth = len(traces[0])
    full = sum(forecast(trace, 0, stack) for trace in traces)
    spent = [sum(forecast(trace, layer, stack) for trace in traces) for layer in range(depth)]
    stop = next((layer for layer in range(depth) if spent[layer] <= (1 - ratio) * full), None)
    end = depth - 1 if stop is None else stop
    going = [
        sum(trace[layer] - trace[layer + 1] for trace in traces) // len(traces)
        for layer in range(end)
    ]
    return Fit(alpha, stop is not None, (*going, *[0] * (depth - end)), spent[end] / full)


def forecast(trace: Trace, layer: int, stack: StackFacts) -> int:
    """Return the FLOPs of all layers if nothing more went from `layer` on."""
    counts = trace[: layer + 1]
    used = sum(layer_flops(n, k, stack) for n, k in pairwise(counts))
    return used + (len(trace) - layer) * layer_flops(counts[-1], counts[-1], stack)


def layer_flops(entering: int, staying: int, stack: StackFacts) -> int:
    """Return the FLOPs of a layer that `entering` visual tokens attend in and `staying` of them leave."""
    width, inner = stack.hidden, stack.intermediate
    attention = 3 * entering * width**2 + 2 * entering**2 * width
    return attention + staying * width**2 + 3 * staying * width * inner


#: Alphas of the scheme's rows; those of a bisection's first four steps are among them.
ALPHAS = tuple(number / 16 for number in range(1, 16))

#: By layer of the site: what words and image pay all visual tokens of the layer before it, without pruning; (B,) each.
Masses = dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class MassRecorder(FitPrune):
    """Drops nothing and notes the masses of every layer."""

    masses: Masses = field(default_factory=dict)

    def plan(self, view: View, keep: int) -> Plan:
        """Note and keep everything."""
        from_words, from_image = attentions(view)
        self.masses[view.site.layer] = from_words.double().sum(1), from_image.double().sum(1)
        n_rows, n_tokens = from_words.shape
        return Plan(torch.arange(n_tokens, device=from_words.device).expand(n_rows, n_tokens))


@dataclass(frozen=True)
class Thinning(FitPrune):
    """Removes, of one image, what an alpha allows in every layer.

    Attributes:
        alpha: share of the masses that a layer may lose.
        masses: of the same image, without pruning.
    """

    alpha: float = 0.0
    masses: Masses = field(default_factory=dict)

    @property
    def adaptive(self) -> bool:
        """Return true: each image keeps its own count."""
        return True

    def plan(self, view: View, keep: int) -> Plan:
        """Keep all that is not in both sets; one token, the one with the highest score, stays whatever alpha is."""
        from_words, from_image = attentions(view)
        before = self.masses[view.site.layer]
        dropped = expendable(from_words, before[0], self.alpha)
        dropped &= expendable(from_image, before[1], self.alpha)
        dropped[:, ranking(from_words * from_image)[:, 0]] = False
        return Plan((~dropped).nonzero()[:, 1].unsqueeze(0))


def expendable(attention: Tensor, mass: Tensor, alpha: float) -> Tensor:
    """Return (B, N): the longest beginning of the tokens in ascending order that leaves the share 1 - alpha of `mass`.

    Args:
        attention: (B, N) that each token receives; of equal ones the higher index goes first.
        mass: (B,) what all tokens received without pruning.
        alpha: from 0 (nothing may be lost) to 1 (everything).
    """
    order = ranking(attention).flip(1)
    from_here = attention.double().gather(1, order).flip(1).cumsum(dim=1).flip(1)
    remaining = torch.cat([from_here[:, 1:], torch.zeros_like(from_here[:, :1])], dim=1)
    fine = remaining >= (1 - alpha) * mass.double().unsqueeze(1)
    return torch.zeros_like(fine).scatter(1, order, fine)


def trace(
    adapter: Adapter,
    images: Iterable[Image],
    prompt: str,
    alphas: Sequence[float],
    digest: ImageDigest,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[float, list[Trace]]:
    """Return, for each alpha, what every image lost.

    Args:
        adapter: a loaded model.
        images: RGB images.
        prompt: the same text for every image, put into the model's chat template.
        alphas: shares of the masses that a layer may lose.
        digest: counts the images.
        advance: called with 1 after each image.

    Cost: 1 + len(alphas) passes an image; one image at a time, since each loses another number of tokens.
    """
    traces: dict[float, list[Trace]] = {alpha: [] for alpha in alphas}
    for image in images:
        inputs = adapter.encode([question(image, prompt)])
        recorder = MassRecorder()
        _prefill(adapter, recorder, inputs)
        for alpha in alphas:
            record = _prefill(adapter, Thinning(alpha=alpha, masses=recorder.masses), inputs)
            traces[alpha].append(tuple(record.entering))
        digest.see(image)
        advance(1)
    return traces


def _prefill(adapter: Adapter, method: FitPrune, inputs: dict[str, Tensor]) -> SampleRecord:
    # The engine takes seconds to import, and a command line is checked before it is needed.
    from espalier.harness.engine.session import Session

    with Session(adapter, method, Budget("kept", 0.0), timed=False) as session:
        generated = session.generate(inputs, max_new_tokens=1, do_sample=False)
    return generated.records[0]
