"""RTPrune: "Reading-Twice Inspired Token Pruning for Efficient DeepSeek-OCR Inference" (ICML 2026, arXiv 2605.00392).

Acts once, on the visual tokens T as they enter the decoder: N grid tokens, without newlines and separators.

    (1)  C_k = |T_k|_2                         the M tokens with the highest norm are kept, the other N - M give
    (2)  P = optimal transport between kept and giving tokens, (3) scores cos(T_i, T_j), (4) dustbin score z,
         (5) marginals of 1, (15)-(17) `iters` Sinkhorn steps without a temperature (methods/select/sinkhorn.py)
    (6)  T_i <- T_i + alpha sum_j P_ij T_j

`merging` is the second stage: `ot`, or one that the paper compares with (methods/select/flows.py). `ratio=dynamic` lets
each sample keep a share of its own, (7) to (10), and meets the run's ratio in the mean (methods/select/page_share.py).

Differs: kept tokens keep their positions, as in the released code. That also folds newlines of empty rows; here every
one stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from espalier.methods.base import Mixture, Need, Plan, Positions, Site, TokenReducer, View
from espalier.methods.checks import require, require_choices
from espalier.methods.select.flows import weights_of
from espalier.methods.select.page_share import own_count, own_share
from espalier.methods.select.similarity import unit
from espalier.methods.select.sinkhorn import transport
from espalier.methods.select.topk import ranking, rows_of

Ratio = Literal["fixed", "dynamic"]
Merging = Literal["none", "ot", "visionzip", "sparsevlm", "nuwa", "gtp"]
Border = Literal["patch", "image"]


@dataclass(frozen=True)
class RTPrune(TokenReducer):
    """Keeps the tokens with the highest norm and adds a small part of the others to them.

    Attributes:
        merging: how dropped tokens flow into kept ones.
        alpha: how much of what flows is added.
        z: score of the dustbins.
        iters: Sinkhorn steps.
        ratio: the same share of every sample, or `dynamic`, a share of each sample's own.
        typical: mean of the samples' own shares 1 - r; 214 of 256 as published for DeepSeek-OCR Base on OmniDocBench.
        tau: gradient above which a pixel is part of an edge.
        similarity_power: power of the cosine in (7), 1 or 2.
        border: what a patch's gradient sees around it: zeros (`patch`), or the picture (`image`).
    """

    merging: Merging = "ot"
    alpha: float = 0.1
    z: float = 0.2
    iters: int = 100
    ratio: Ratio = "fixed"
    typical: float = 214 / 256
    tau: float = 0.2
    similarity_power: int = 2
    border: Border = "patch"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require_choices(self, merging=Merging, ratio=Ratio, border=Border)
        require(0 <= self.alpha <= 1, "alpha", self.alpha, "a number from 0 to 1")
        require(-10 <= self.z <= 10, "z", self.z, "a number from -10 to 10")
        require(self.iters >= 1, "iters", self.iters, "1 or more")
        require(0 < self.typical <= 1, "typical", self.typical, "a number above 0, at most 1")
        require(0 <= self.tau < math.inf, "tau", self.tau, "0 or more")
        require(self.similarity_power in (1, 2), "similarity_power", self.similarity_power, "1, 2")

    @property
    def adaptive(self) -> bool:
        """Whether each sample has its own count."""
        return self.ratio == "dynamic"

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix."""
        del depth
        return (Site("prefix"),)

    def positions(self, depth: int) -> Positions:
        """Keep positions, as the released code."""
        del depth
        return "original"

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the picture's luma if the ratio is dynamic."""
        del site
        return (Need("luma"),) if self.adaptive else ()

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the longest tokens and merge.

        Cost: O(N D + N log N), O(M (N - M) (D + iters)) for the transport, and O(M N D) for the engine's product;
        `dynamic` adds O(N^2 D) and the picture's pixels, and waits for the device.

        Raises:
            MethodError: a token or a pixel is NaN or infinite; several rows with different counts.
        """
        n_tokens = view.tokens.shape[1]
        norms = torch.linalg.vector_norm(view.tokens.float(), dim=2)
        order = ranking(norms)
        if self.adaptive and keep < n_tokens:
            keep = own_count(self.own_share(view), keep / self.typical, n_tokens)
        kept, dropped = (part.sort(dim=1).values for part in (order[:, :keep], order[:, keep:]))
        if self.merging == "none" or keep == n_tokens:
            return Plan(kept)
        if self.merging == "ot":
            takers, givers = (view.tokens[rows_of(kept), part] for part in (kept, dropped))
            weights = transport(unit(takers) @ unit(givers).transpose(1, 2), self.z, self.iters)
        else:
            weights = weights_of(self.merging, view, norms, kept, dropped)
        matrix = weights.new_zeros(len(kept), keep, n_tokens).scatter_(2, kept.unsqueeze(2), 1.0)
        index = dropped.unsqueeze(1).expand_as(weights)
        return Plan(kept, Mixture(matrix.scatter_(2, index, self.alpha * weights)))

    def own_share(self, view: View) -> Tensor:
        """Return (B,) the shares 1 - r that the paper keeps."""
        return own_share(view, self.similarity_power, self.tau, self.border == "image")
