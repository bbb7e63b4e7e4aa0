"""RTPrune: "Reading-Twice Inspired Token Pruning for Efficient DeepSeek-OCR Inference" (ICML 2026, arXiv 2605.00392).

Acts once, on the visual tokens T as they enter the decoder: N grid tokens, without newlines and separators.

    (1)  C_k = |T_k|_2                         the M tokens with the highest norm are kept, the other N - M give
    (2)  P = optimal transport between kept and giving tokens, (3) scores cos(T_i, T_j), (4) dustbin score z,
         (5) marginals of 1, (15)-(17) `iters` Sinkhorn steps without a temperature (methods/select/sinkhorn.py)
    (6)  T_i <- T_i + alpha sum_j P_ij T_j

`merging` is the second stage; the others are those that the paper compares with, each T_i <- T_i + alpha sum_j W_ij T_j
over the tokens not kept, W from the same tokens T:

    none        W = 0
    ot          W = P
    visionzip   mean of the tokens that resemble i most
    sparsevlm   mean of the clusters that resemble i most, made of the best of the tokens not kept, by their norm
    nuwa        max(cos, 0) (1 - min(1, distance / R)), rows scaled to 1; R^2 = 280/576 of the grid's area
    gtp         D^-1/2 A D^-1/2 over all N tokens; A_ij = 1 if j is one of i's 8 neighbours in the grid or one of the 8
                nearest to i in cosine, which is directed as in GTP-ViT's code; D are the sums of A's rows

The paper does not describe how these were adapted. Here their own selection is not used, nothing flows between kept
tokens, and no kept token gives up its own weight.

`ratio=dynamic` lets each sample keep a share of its own. The paper removes r of its tokens,

    (7)  phi = mean over i != j of cos(T_i, T_j)^similarity_power    2 in the authors' code
    (8)  rho = mean over the global view's patches of the share of pixels with Sobel gradient > tau
    (9)  r = phi (1 - rho)

of the picture in [-1, 1], (10) in BT.601 luma. `border=patch` pads each patch with zeros, as the code does: white paper
then has edges at every patch's border, grey letterbox has none. Here the run states a ratio, which is met in the mean
over samples:

    k = round(keep (1 - r) / typical),   at least 1, at most N;   all tokens where nothing is to be removed

with `typical` the mean of 1 - r over samples like these. A ratio of 1 - typical gives every sample the paper's own
count, up to rounding (the paper rounds down). To measure `typical` on other data, run once with typical=1 and any ratio
above 0: it is `kept` over `requested` of the row's site. If the ratio is so small that samples reach the upper bound N,
the mean falls short of it.

Kept tokens keep their positions, as in the released code. That code also folds runs of newline tokens of empty rows
into one; here only visual tokens are dropped, and every newline stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from espalier.methods.base import (
    MethodError,
    Mixture,
    Need,
    Plan,
    Positions,
    Site,
    TokenReducer,
    View,
)
from espalier.methods.checks import require
from espalier.methods.select.absorption import clusters, most_similar, nearby
from espalier.methods.select.propagation import mixed_graph, normalised
from espalier.methods.select.similarity import cosine, unit
from espalier.methods.select.sinkhorn import transport
from espalier.methods.select.sobel import edge_share
from espalier.methods.select.topk import ranking, rows_of

Ratio = Literal["fixed", "dynamic"]
Merging = Literal["none", "ot", "visionzip", "sparsevlm", "nuwa", "gtp"]
Border = Literal["patch", "image"]
#: Of the merging steps compared with: neighbours (GTP-ViT), share and size of clusters (SparseVLM), area (NUWA).
NEIGHBOURS, RECYCLED, CLUSTER, AREA = 8, 0.3, 10, 280 / 576


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
        for key, choices in (("merging", Merging), ("ratio", Ratio), ("border", Border)):
            value = getattr(self, key)
            require(value in get_args(choices), key, value, ", ".join(get_args(choices)))
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
        weights = self.weights(view, norms, kept, dropped)
        matrix = weights.new_zeros(len(kept), keep, n_tokens).scatter_(2, kept.unsqueeze(2), 1.0)
        index = dropped.unsqueeze(1).expand_as(weights)
        return Plan(kept, Mixture(matrix.scatter_(2, index, self.alpha * weights)))

    def weights(self, view: View, norms: Tensor, kept: Tensor, dropped: Tensor) -> Tensor:
        """Return W (B, M, N - M), how much of each dropped token flows into each kept one."""
        tokens, rows = view.tokens, rows_of(kept)
        if self.merging == "gtp":
            graph = normalised(mixed_graph(cosine(tokens), view.grid, NEIGHBOURS))
            return graph[rows.unsqueeze(2), kept.unsqueeze(2), dropped.unsqueeze(1)]
        takers, givers = tokens[rows, kept], tokens[rows, dropped]
        if self.merging == "sparsevlm":
            return clusters(givers, takers, norms.gather(1, dropped), RECYCLED, CLUSTER)
        similarity = unit(takers) @ unit(givers).transpose(1, 2)
        if self.merging == "visionzip":
            return most_similar(similarity)
        if self.merging == "nuwa":
            return nearby(similarity, view.grid, kept, dropped, AREA)
        return transport(similarity, self.z, self.iters)

    def own_share(self, view: View) -> Tensor:
        """Return (B,) the shares 1 - r that the paper keeps, equations (7) to (9), at most 1."""
        n_tokens = view.tokens.shape[1]
        powers = cosine(view.tokens).pow(self.similarity_power)
        pairs = powers.sum(dim=(1, 2)) - powers.diagonal(dim1=1, dim2=2).sum(dim=1)
        phi = pairs / max(1, n_tokens * (n_tokens - 1))
        density = edge_share(view.signals["luma"], self.tau, self.border == "image")
        overview = (view.grid[:, :, 1] == 0).float()  # a global view shows all of the page
        rho = (density * overview).sum(dim=1) / overview.sum(dim=1).clamp(min=1)
        return (1 - phi * (1 - rho)).clamp(max=1)


def own_count(shares: Tensor, unit: float, n_tokens: int) -> int:
    """Return round(unit share), 1 to `n_tokens`, of the only row, or of rows that agree. One device synchronisation.

    Raises:
        MethodError: the counts of several rows differ, so that no one plan holds for them.
    """
    owns: list[float] = shares.tolist()
    counts = {min(max(1, math.floor(unit * share + 0.5)), n_tokens) for share in owns}
    if len(counts) > 1:
        raise MethodError(f"ratio=dynamic decides one row at a time, and {len(owns)} rows differ")
    return counts.pop()
