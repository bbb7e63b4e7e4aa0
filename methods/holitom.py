"""HoliTom: "Holistic Token Merging for Fast Video LLMs" (Shao et al., NeurIPS 2025, arXiv 2505.21334).

**Windows.** A place i is still in a window of frames s to e if cos(x[t, i], x[t+1, i]) > tau for all its t < e. A video
is cut into the windows that spare the most tokens, the sum of (e - s) times the still places of each, by dynamic
programming; of equal cuts the one with the shorter last window stays. A still place becomes one token, the mean of its
frames, at the window's first frame.

**Tokens.** What is left, the still places of each window and the others of each frame, keeps the same share of its
tokens. Of the others those stay that the class token attends to most. Of the still ones the centres of clusters do, the
highest rho delta, with

    rho_i = exp(-mean of its K smallest d_ij^2),   delta_i = min d_ij over denser j

d^2 the squared distance over the width, i itself included. A token goes to its nearest centre, and a centre a becomes
beta a + (1 - beta) times the mean of those that joined it.

**In the decoder**, before layer k, the share r of the tokens goes to which the last prompt token pays the least
attention in layer k - 1. Each of them in turn, in sequence order, is averaged into the kept one with the highest
cosine: a <- (a + b) / 2.

Followed is the released code (github.com/cokeshao/HoliTom, commit e9b2972f) with its defaults; tau is 0.65 there at a
tenth of the tokens, k is 18 of 28 layers, read at the same share of other depths, and r = 0 is "HoliTom (w/o M)".
Clusters of a frame's other tokens (D > 0) end in an error there, and are left out. It rounds the share of each frame up
and that of each window's still places to the nearest; here the budget is exact, by largest remainders. Where still
places leave fewer tokens than the budget it keeps so many; here the least similar ones move again until it fits.
Density has no random part; the lower index counts as denser. Tokens stand in raster order; the code has a window's
still ones first for LLaVA-OneVision. Gaps in positions close up after both stages, in the code after the first. Every
video of a prompt is cut by itself, and they share the budget by their tokens; a picture is a video of one frame.
Newlines stay. The paper's text was not compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, pad

from espalier.methods.base import Assignment, Need, Plan, Positions, Site, TokenReducer, View
from espalier.methods.checks import layer_site, require, require_finite
from espalier.methods.select.quotas import apportion
from espalier.methods.select.similarity import unit
from espalier.methods.select.stills import (
    clusters,
    parts_of,
    plan_of_clips,
    still_places,
    windows,
)
from espalier.methods.select.topk import rows_of, top


@dataclass(frozen=True)
class HoliTom(TokenReducer):
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

    def needs_frames(self) -> bool:
        """Return true: frames are compared."""
        return True

    def positions(self, depth: int) -> Positions:
        """Close the gaps, as the released code after its first stage."""
        del depth
        return "renumbered"

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
        return plan_of_clips(view.grid, (tokens, attention), keep, self.of_clip, attention)

    def of_clip(self, tokens: Tensor, attention: Tensor, keep: int) -> tuple[Tensor, Tensor]:
        """Return (T n) the token that each token of a clip (T, n, D) goes to, -1 for none, and its weight there."""
        alike = cosine_similarity(tokens[:-1], tokens[1:], dim=2)
        runs = windows(alike > self.tau)
        alike = pad(alike, (0, 0, 0, 1))
        lowest = [alike[first : max(last, first + 1)].amin(dim=0) for first, last in runs]
        parts = parts_of(still_places(torch.stack(lowest), runs, self.tau, keep), runs)
        sizes = torch.tensor([[len(part) for part in parts]])
        into = torch.full((attention.numel(),), -1, device=tokens.device)
        weight = torch.zeros(attention.numel(), device=tokens.device)
        tokens, attention = tokens.flatten(0, 1), attention.flatten()
        for part, quota in zip(parts, apportion(sizes, sizes, keep)[0].tolist(), strict=True):
            if part.shape[1] == 1:
                stays = part[top(attention[part[:, 0]].unsqueeze(0), quota)[0], 0]
                into[stays], weight[stays] = stays, 1.0
            elif quota:
                joined, share = self.clustered(tokens[part].mean(dim=1), quota)
                into[part] = part[joined, :1].expand_as(part)
                weight[part] = share.unsqueeze(1).expand_as(part) / part.shape[1]
        return into, weight

    def clustered(self, values: Tensor, n_centres: int) -> tuple[Tensor, Tensor]:
        """Return (M,) the centre that each of the values (M, D) joins, itself for centres, and its weight there."""
        joined = clusters(values, n_centres, min(self.K, n_centres))
        joiners = torch.bincount(joined, minlength=len(values)) - 1
        own_share = torch.where(joiners > 0, self.beta, 1.0)
        share = (1 - self.beta) / joiners.clamp(min=1)
        leads = joined == torch.arange(len(values), device=joined.device)
        return joined, torch.where(leads, own_share, share[joined])


def halved_into(tokens: Tensor, kept: Tensor) -> Assignment:
    """Return the merging of each other token (B, N, D) in turn into the kept one most like it, half and half."""
    units = unit(tokens)
    nearest = (units @ units[rows_of(kept), kept].transpose(1, 2)).argmax(dim=2)
    stays = torch.zeros_like(nearest, dtype=torch.bool).scatter(1, kept, True)
    slot = torch.where(stays, stays.cumsum(dim=1) - 1, nearest)
    group = torch.where(stays, kept.shape[1], slot)
    order = group.argsort(dim=1, stable=True)
    sizes = torch.zeros_like(kept[:, :1]).expand(-1, kept.shape[1] + 1)
    sizes = sizes.scatter_add(1, group, torch.ones_like(group))
    place = torch.arange(group.shape[1], device=group.device).expand_as(group)
    ranked = place - (sizes.cumsum(dim=1) - sizes).gather(1, group.gather(1, order))
    rank = torch.zeros_like(group).scatter(1, order, ranked)
    later = sizes.gather(1, slot) - torch.where(stays, 0, rank)
    return Assignment(slot, 0.5 ** later.float())
