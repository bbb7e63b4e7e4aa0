"""FastVID: "Dynamic Density Pruning for Fast Video LLMs" (Shen et al., NeurIPS 2025, arXiv 2503.11187).

**Segments.** With t_i = cos(f_i, f_{i+1}) between the mean tokens of adjacent frames, a video is cut after the frames
of the c - 1 smallest t_i, and wherever t_i < tau. A segment keeps as many tokens as its frames together are due.

**Tokens.** Of the K tokens of a segment of m frames, floor(d K) are anchors, and the others are those of each frame
with the highest class-token attention, the same number in each frame (the first frames take one more). Anchors come
from every p-th frame, counted back from the segment's last, the same number from each (the last of them take one
more): the tokens i that are not kept yet with the highest

    rho_i delta_i,   rho_i = exp(-mean of its 4 smallest d_ij^2),   delta_i = min d_ij over denser j

d^2 the squared distance over D, i itself included. The anchors a of one frame then take in the rest of the segment, the
anchors of its other frames included, where every token b goes to the one with the highest cosine:

    a <- w a + (1 - w) mean of its n tokens b,   w = max(1 / (n + 1), beta)

Differs: followed is the released code for LLaVA-Video (github.com/LunarShen/FastVID, commit a40a109); that for
LLaVA-OneVision scores all frames at once, lets anchors of their own frame join the mean, and rounds the number of
anchors down frame by frame. Where the released code rounds a frame's share down, the budget is exact here: frames get
their shares rounded up or down, evenly over time. Anchors that a frame has no tokens left for become tokens of
attention. Density has no random part; the lower index counts as denser. Frames are described by the mean of their
tokens, as in the code for Qwen2.5-VL; for LLaVA it reads the output of SigLIP's pooling head. Several videos are cut
between each other. Newlines stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.methods.base import Mixture, Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import require, require_finite
from espalier.methods.select.anchors import salient_and_anchors, taking_in
from espalier.methods.select.frames import Frames, spread
from espalier.methods.select.quotas import best_of_groups
from espalier.methods.select.segments import segments_by_likeness


@dataclass(frozen=True)
class FastVID(TokenReducer):
    """Keeps each frame's most attended tokens, and dense ones of some frames that take in the rest of their segment.

    Attributes:
        c: least number of segments.
        tau: similarity of adjacent frames below which a segment ends.
        d: share of anchors among the tokens of a segment.
        p: frames from one frame with anchors to the next.
        beta: least weight of an anchor in its mean.
    """

    c: int = 8
    tau: float = 0.9
    d: float = 0.4
    p: int = 4
    beta: float = 0.6

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.c >= 1, "c", self.c, "1 or more")
        require(-1 <= self.tau <= 1, "tau", self.tau, "a cosine, -1 to 1")
        require(0 <= self.d <= 1, "d", self.d, "0 to 1")
        require(self.p >= 1, "p", self.p, "1 or more")
        require(0 <= self.beta <= 1, "beta", self.beta, "0 to 1")

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix."""
        del depth
        return (Site("prefix"),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the class token's attention."""
        del site
        return (Need("cls_attention"),)

    def needs_frames(self) -> bool:
        """Return true: segments are made of frames."""
        return True

    def plan(self, view: View, keep: int) -> Plan:
        """Keep and merge, frame by frame. Cost: O(N D + A n^2 D + keep M D), A frames of n with anchors, segments of M.

        The product adds O(keep N D): 1.4 to 1.5 of X X^T at 576 tokens, 0.7 at 2,880. Frames wait for the device.
        """
        attention = require_finite(view.signals["cls_attention"].float(), "attention")
        if keep == view.tokens.shape[1]:
            return Plan(torch.arange(keep, device=attention.device).expand(len(attention), keep))
        frames = Frames.of(view.grid)
        quotas = spread(frames.size, frames.size.new_full((len(attention), 1), keep))
        tables = (view.tokens.float(), attention, frames.size, quotas, frames.place)
        rows = [self.of_row(*row) for row in zip(*tables, strict=True)]
        kept, matrices = (torch.stack(parts) for parts in zip(*rows, strict=True))
        return Plan(kept, Mixture(matrices), scores=attention)

    def of_row(
        self, tokens: Tensor, attention: Tensor, sizes: Tensor, quotas: Tensor, place: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (K,) kept tokens of one sample, ascending, and (K, N) their mixture."""
        kept, matrices, start = [], [], 0
        sizes = sizes[sizes > 0]
        for first, last in segments_by_likeness(tokens, sizes, place, self.c, self.tau):
            frames, total = sizes[first : last + 1].tolist(), int(quotas[first : last + 1].sum())
            end = start + sum(frames)
            stays, matrix = self.of_segment(tokens[start:end], attention[start:end], frames, total)
            kept.append(stays + start)
            matrices.append(matrix)
            start = end
        return torch.cat(kept), torch.block_diag(*matrices)

    def of_segment(
        self, tokens: Tensor, attention: Tensor, sizes: Sequence[int], total: int
    ) -> tuple[Tensor, Tensor]:
        """Return (total,) kept tokens of a segment, ascending, and (total, M) their mixture of its M tokens."""
        salient, anchors = salient_and_anchors(sizes, total, self.d, self.p)
        frame = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        frame = frame.to(attention.device).unsqueeze(0)
        stays = best_of_groups(attention.unsqueeze(0), frame, salient.to(frame).unsqueeze(0))[0]
        return taking_in(tokens, stays, sizes, anchors.tolist(), self.beta)
