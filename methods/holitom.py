"""HoliTom: "Holistic Token Merging for Fast Video LLMs" (Shao et al., NeurIPS 2025, arXiv 2505.21334).

**Windows.** A place i is still in a window of frames s to e if cos(x[t, i], x[t+1, i]) > tau for all its t < e. A video
is cut into the windows that spare the most tokens, the sum of (e - s) times the still places of each; of equal cuts
into those with the shorter last window. A still place becomes one token, the mean of its frames, in the first.

**Tokens.** What is left, the still places of each window and the others of each frame, keeps the same share of its
tokens. Of the others those stay that the class token attends to most. Of the still ones the centres of clusters do, the
highest rho delta, with

    rho_i = exp(-mean of its K smallest d_ij^2),   delta_i = min d_ij over denser j

d^2 the squared distance over the width, i itself included. A token goes to its nearest centre, and a centre a becomes
beta a + (1 - beta) times the mean of those that joined it.

**In the decoder**, before layer k, the share r of the tokens goes to which the last prompt token pays the least
attention in layer k - 1. Each of them in turn, in sequence order, is averaged into the kept one with the highest
cosine: a <- (a + b) / 2.

Differs: followed is the released code (github.com/cokeshao/HoliTom, commit e9b2972f) with its defaults; tau is 0.65
there at a tenth of the tokens, k is 18 of 28 layers, read at the same share of other depths, and r = 0 is "HoliTom (w/o
M)". Clusters of a frame's other tokens (D > 0) end in an error there, and are left out. It rounds the share of each
frame up and that of each window's still places to the nearest; here the budget is exact, by largest remainders. Where
still places leave fewer tokens than the budget it keeps so many; here the least similar ones move again until it fits.
Density has no random part; the lower index counts as denser. Tokens stand in raster order; the code has a window's
still ones first for LLaVA-OneVision. Gaps in positions close up after both stages, in the code after the first. Every
video of a prompt is cut by itself, and they share the budget by their tokens; a picture is a video of one frame.
Newlines stay. The paper's text was not compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from espalier.methods.base import Need, Plan, Site, View
from espalier.methods.checks import layer_site, require, require_finite
from espalier.methods.clip_stages import ClipStages
from espalier.methods.select import stills
from espalier.methods.select.merge import halved_into
from espalier.methods.select.topk import top


@dataclass(frozen=True)
class HoliTom(ClipStages):
    """Merges what stands still over time and is alike in space, and then what the decoder attends to least.

    Attributes:
        tau: cosine with the next frame above which a place stands still.
        beta: weight of a centre in what it becomes.
        K: neighbours of a token's density.
        k: decoder layer of the second stage; null: 18 of 28 layers, or the same share.
        r: share of the first stage's tokens that the second merges; 0: there is no second stage.
    """

    tau: float = 0.8
    beta: float = 0.6
    K: int = 7
    k: int | None = None
    r: float = 0.5

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(-1 <= self.tau <= 1, "tau", self.tau, "a cosine, -1 to 1")
        require(0 <= self.beta <= 1, "beta", self.beta, "0 to 1")
        require(self.K >= 1, "K", self.K, "1 or more")
        require(self.k is None or self.k >= 1, "k", self.k, "1 or more, or null")
        require(0 <= self.r < 1, "r", self.r, "0 <= r < 1")

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix, and the site before layer k."""
        natural = max(1, round(depth * 18 / 28)) if self.k is None else self.k
        second = (layer_site("k", natural, depth),) if self.r > 0 else ()
        return (Site("prefix"), *second)

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        """Return the share that each stage keeps: the first 1 / (1 - r) times that of the second, at most all."""
        return (min(1.0, share / (1 - self.r)), share)[:n_sites]

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the attention of the class token, or of the last prompt token."""
        return (Need("last_attention" if site.where == "layer" else "cls_attention"),)

    def plan(self, view: View, keep: int) -> Plan:
        """Carry out the stage of the view's site.

        Cost: stage 1 O(N D + T^2 n + S n^2 D), T frames of n tokens, S windows with still places; stage 2 O(keep N D).
        The device is waited for a few times in every frame.
        """
        tokens = require_finite(view.tokens.float(), "tokens")
        (need,) = self.needs(view.site)
        attention = require_finite(view.signals[need.key].float(), "attention")
        if view.site.where == "layer":
            kept = top(attention, keep)
            return Plan(kept, halved_into(tokens, kept), scores=attention)
        signals = (tokens, attention)
        return stills.plan_of_clips(view.grid, signals, keep, self.of_clip, attention)

    def of_clip(self, tokens: Tensor, attention: Tensor, keep: int) -> tuple[Tensor, Tensor]:
        """Return (T n) the token that each token of a clip (T, n, D) goes to, -1 for none, and its weight there."""
        alike = cosine_similarity(tokens[:-1], tokens[1:], dim=2)
        windows = stills.windows(alike > self.tau)
        parts = stills.parts_of(stills.lowest(alike, windows), windows, self.tau, keep)
        into = torch.full((attention.numel(),), -1, device=tokens.device)
        weight = torch.zeros(attention.numel(), device=tokens.device)
        tokens, attention = tokens.flatten(0, 1), attention.flatten()
        for part, quota in parts:
            if part.shape[1] == 1:
                stays = part[top(attention[part[:, 0]].unsqueeze(0), quota)[0], 0]
                into[stays], weight[stays] = stays, 1.0
            elif quota:
                joined = stills.clusters(tokens[part].mean(dim=1), quota, min(self.K, quota))
                share = stills.centre_weights(joined, self.beta)
                into[part] = part[joined, :1].expand_as(part)
                weight[part] = share.unsqueeze(1).expand_as(part) / part.shape[1]
        return into, weight
