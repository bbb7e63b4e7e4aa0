"""PruneVid: "Visual Token Pruning for Efficient Video LLMs" (Huang et al., ACL Findings 2025, arXiv 2412.16117).

**Before the decoder.** Frames, as the means of their tokens, are clustered around floor(gamma T) density peaks

    the highest rho delta,   rho_i = exp(-mean of its 7 smallest d_ij^2),   delta_i = min d_ij over denser j

d^2 the squared distance over the width, i itself included. Of each cluster the longest runs of frames stay, unless they
are of one frame; any other run joins the longer of the runs at its sides, the left one of two equals. Where the cluster
changes, a segment ends. A place of a segment of w frames is static if the mean cosine of its w (w - 1) pairs of tokens
is above tau, and becomes one token, their mean, in the segment's first frame. What is left, the static tokens of each
segment and the others of each frame, keeps the same share of its tokens: density peaks again, and every token goes to
the nearest one, which becomes the mean of its cluster.

**In the decoder**, after layer M, each frame keeps the share alpha of its tokens with the highest attention in that
layer, the largest over heads and over the words after the video.

Differs: followed is the released code for PLLaVA (github.com/Visual-AI/PruneVid, commit b12600c6): gamma 0.25, tau 0.8,
alpha 0.4, and layer 10 of 32, read at the same share of other depths. There the first stage keeps half of each part
(beta 0.5), so that the count follows from the video; here from the budget, exactly, by largest remainders, and where
static places leave fewer tokens the least similar ones become others again. Parts of up to 14 tokens stay whole there;
here they have their share. In the decoder it ranks static tokens apart from those of the frame in which they stand
here, and it removes the entries of layers up to M from the cache too, which stay here. Density has no random part; the
lower index counts as denser. Tokens stand in raster order, where the code has static ones first, clusters by density.
Gaps in positions close up after both stages, in the code after the first. Every video of a prompt has segments of its
own, and they share the budget by their tokens; a picture is a video of one frame. The paper's text was not compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from espalier.methods.base import Need, Plan, Site, View
from espalier.methods.checks import layer_site, read, require, require_finite
from espalier.methods.clip_stages import ClipStages
from espalier.methods.select import stills
from espalier.methods.select.frames import Frames
from espalier.methods.select.quotas import apportion, top_of_groups
from espalier.methods.select.segments import segments_of

#: Neighbours of a density.
NEAR = 7


@dataclass(frozen=True)
class PruneVid(ClipStages):
    """Merges static places of segments and clusters of a frame, then keeps what the words attend to.

    Attributes:
        tau: mean cosine over a segment above which a place is static.
        gamma: clusters of frames, as a share of the frames.
        alpha: share of the first stage's tokens that the second keeps.
        M: decoder layer, from 0, after which the second stage acts; null: 10 of 32 layers, or the same share.
    """

    tau: float = 0.8
    gamma: float = 0.25
    alpha: float = 0.4
    M: int | None = None

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(-1 <= self.tau <= 1, "tau", self.tau, "a cosine, -1 to 1")
        require(0 < self.gamma <= 1, "gamma", self.gamma, "a number in (0, 1]")
        require(0 < self.alpha <= 1, "alpha", self.alpha, "a number in (0, 1]")
        require(self.M is None or self.M >= 0, "M", self.M, "0 or more, or null")

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix, and the site after layer M."""
        natural = min(round(depth * 10 / 32), depth - 2) if self.M is None else self.M
        return (Site("prefix"), layer_site("M", natural + 1, depth))

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        """Return the share that each stage keeps: the first 1 / alpha times that of the second, at most all."""
        del n_sites
        return (min(1.0, share / self.alpha), share)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the words' attention for the second stage."""
        return (Need("text_received_peak"),) if site.where == "layer" else ()

    def plan(self, view: View, keep: int) -> Plan:
        """Carry out the stage of the view's site.

        Cost: stage 1 O(N n D), frames of n tokens; stage 2 O(N log N). Stage 1 waits for the device in every frame.
        """
        if view.site.where == "layer":
            scores = view.signals["text_received_peak"].float()
            frames = Frames.of(view.grid)
            quotas = apportion(frames.size, frames.size, keep)
            return Plan(top_of_groups(scores, frames.index, quotas, keep), scores=scores)
        tokens = require_finite(view.tokens.float(), "tokens")
        return stills.plan_of_clips(view.grid, (tokens,), keep, self.of_clip)

    def of_clip(self, tokens: Tensor, keep: int) -> tuple[Tensor, Tensor]:
        """Return (T n) the token that each token of a clip (T, n, D) goes to, -1 for none, and its weight there."""
        n_centres = max(1, int(len(tokens) * self.gamma + 1e-9))
        labels = stills.clusters(tokens.mean(dim=1), n_centres, NEAR)
        segments = segments_of(read(labels)[0].tolist())
        units = normalize(tokens, dim=2)
        alike = [stills.pair_mean(units[first : last + 1]) for first, last in segments]
        flat = tokens.flatten(0, 1)
        into = torch.full(flat.shape[:1], -1, device=tokens.device)
        weight = torch.zeros(flat.shape[:1], device=tokens.device)
        for part, quota in stills.parts_of(torch.stack(alike), segments, self.tau, keep):
            if quota:
                joined = stills.clusters(flat[part].mean(dim=1), quota, NEAR)
                members = torch.bincount(joined, minlength=len(part))[joined] * part.shape[1]
                into[part] = part[joined, :1].expand_as(part)
                weight[part] = (1 / members).unsqueeze(1).expand_as(part)
        return into, weight
