"""AutoPrune: "Each Complexity Deserves a Pruning Policy" (Wang et al., NeurIPS 2025, arXiv 2509.23931).

Every decoder layer drops tokens, by a curve measured for each sample, under one budget. With t the mean number of
tokens that leave a layer, and A_l the attention of the T words after the image in layer l, mean over heads and words,

    before layer 1      m = 2.5 t tokens with the highest c + 0.3 (I_0 / T) A_0 stay, c the class token's attention
    before layer l + 1  m min(1, s f(l)) stay,    f(l) = 1 / (1 + exp(k (l - x0 - k))),    k = max(k0 - gamma I_1, 0),

those with the highest A_l and clusters of the best others, as in SparseVLM (methods/select/recycle.py). s meets the
budget. I_l is the mutual information of words x and tokens y in layer l's attention, sum over heads:

    I = sum p(x, y) log2 (p(x, y) / (p(x) p(y) + 1e-6)),    p(x, y) = a(x, y) / T,    p(x) = 1 / T

Differs: followed is the released code (github.com/AutoLab-SAI-SJTU/AutoPrune, commit e4a99188); the paper's text was
not compared. The code's 64, 128 and 192 of 576 tokens in 32 layers are ratio=0.8577, 0.7466 and 0.6355 under
budget=average, which counts what enters a layer. Its clusters are added to the curve's counts and come after the
tokens; here they are part of the counts, which changes these by 3 at most for k from 0.25 on, and stand at their
centres. The code bounds the ratio in I below by 1e-6, which changes I by less than 1e-4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from espalier.methods.base import Need, Plan, Positions, Site, TokenReducer, View
from espalier.methods.checks import read, require, require_finite
from espalier.methods.select.recycle import recycle, split
from espalier.methods.select.topk import ranking, top
from espalier.methods.select.words import words_after


@dataclass(frozen=True)
class AutoPrune(TokenReducer):
    """Keeps what the words attend to, by a curve over the layers that bends with their mutual information.

    Attributes:
        x0: layer about which the curve falls, the same at every depth.
        k0: slope at no mutual information.
        gamma: decrease of the slope by each bit of it.
        slope: k of all samples; null: measured for each sample.
        first: tokens before layer 1, over t.
        words: weight of the words before layer 1.
        tau: share of the deleted tokens that is recycled, 0 for none.
        theta: recycled tokens of a cluster.
    """

    x0: float = 14.9
    k0: float = 0.4
    gamma: float = 0.2
    slope: float | None = None
    first: float = 2.5
    words: float = 0.3
    tau: float = 0.3
    theta: int = 10

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        for key in ("k0", "gamma", "words", "slope", "first", "theta"):
            value, low = getattr(self, key), int(key in ("first", "theta"))
            require(value is None or value >= low, key, value, f"{low} or more")
        require(0 <= self.tau <= 0.9, "tau", self.tau, "a number from 0 to 0.9")

    @property
    def curved(self) -> bool:
        """Whether each sample has a slope of its own."""
        return self.slope is None

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the sites before every layer but the first."""
        return tuple(Site("layer", layer) for layer in range(1, depth))

    def positions(self, depth: int) -> Positions:
        """Return `renumbered`: the released code counts from the first position in every layer."""
        del depth
        return "renumbered"

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the words' attention, with their information before layers 1 and 2, and the class token's before 1."""
        names = ["text_attention", "text_positions", "all_positions"]
        names += ["text_information"] * (site.layer <= (2 if self.curved else 1))
        return tuple(map(Need, names + ["cls_attention"] * (site.layer == 1)))

    def measured(self, view: View) -> TokenReducer | None:
        """Return the method with the slope by the attention of layer 1; None at other sites."""
        if view.site.layer != 2:
            return None
        (bits,) = read(require_finite(view.signals["text_information"], "mutual information"))
        return replace(self, slope=max(self.k0 - self.gamma * float(bits), 0.0))

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        """Return the shares for t = `share`, by the slope or, before it is measured, by k0."""
        k = self.k0 if self.slope is None else self.slope
        first = min(1.0, self.first * share)
        # The bound keeps `exp` from overflowing on steep curves.
        falls = (min(k * (layer - self.x0 - k), 600.0) for layer in range(1, n_sites + 1))
        curve, total = [1 / (1 + math.exp(fall)) for fall in falls], (n_sites + 1) * share / first
        return (first, *(first * part for part in scaled(curve, total - 1)[:-1]))

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the best, and recycle. Cost: O(T N + N log N), and O(R^2 (D + log R)) for R recycled tokens."""
        signals = view.signals
        weight = words_after(signals["text_positions"], signals["all_positions"]).float()
        weight /= weight.sum(dim=1, keepdim=True)
        received = (weight.unsqueeze(1) @ signals["text_attention"].float()).squeeze(1)
        if view.site.layer > 1:
            counts = split(received.shape[1], keep, self.tau, self.theta)
            return recycle(view.tokens, ranking(received), counts, by_cosine=False, summed=False)
        bits = signals["text_information"].float() * weight.amax(dim=1, keepdim=True)
        scores = signals["cls_attention"].float() + self.words * bits * received
        return Plan(top(scores, keep), scores=scores)


def scaled(curve: list[float], total: float) -> list[float]:
    """Return a falling curve, times the factor by which the values, cut at 0 and 1, have the sum `total`."""
    for n_full in range(len(curve)):
        factor = max(0.0, (total - n_full) / sum(curve[n_full:]))
        if factor * curve[n_full] <= 1:
            break
    return [min(1.0, factor * value) for value in curve]
