"""The passes that fit FitPrune (arXiv 2409.10197): masses without pruning, then the tokens that each alpha removes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget
from espalier.harness.tools.calibration.bisection import Trace
from espalier.harness.tools.calibration.calibration_images import ImageDigest, question
from espalier.methods.base import Plan, View
from espalier.methods.fitprune import FitPrune, attentions
from espalier.methods.select.topk import ranking

if TYPE_CHECKING:
    from PIL.Image import Image

    from espalier.harness.engine.record import SampleRecord
    from espalier.harness.models.adapter import Adapter

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
    ascending = attention.double().gather(1, order)
    from_here = ascending.flip(1).cumsum(dim=1).flip(1)
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
            traces[alpha].append(Trace(record.entering))
        digest.see(image)
        advance(1)
    return traces


def _prefill(adapter: Adapter, method: FitPrune, inputs: dict[str, Tensor]) -> SampleRecord:
    # The engine takes seconds to import, and a command line is checked before it is needed.
    from espalier.harness.engine.session import Session

    with Session(adapter, method, Budget("kept", 0.0), timed=False) as session:
        generated = session.generate(inputs, max_new_tokens=1, do_sample=False)
    return generated.records[0]
