"""FastVID: "Dynamic Density Pruning for Fast Video LLMs" (Shen et al., NeurIPS 2025, arXiv 2503.11187).

**Segments.** With t_i = cos(f_i, f_{i+1}) between the mean tokens of adjacent frames, a video is cut after the frames
of the c - 1 smallest t_i, and wherever t_i < tau. A segment keeps as many tokens as its frames together are due.

**Tokens.** Of the K tokens of a segment of m frames, floor(d K) are anchors, and the others are those of each frame
with the highest class-token attention, the same number in each frame (the first frames take one more). Anchors come
from every p-th frame, counted back from the segment's last, the same number from each (the last of them take one
more): the tokens i that are not kept yet with the highest

    rho_i delta_i,   rho_i = exp(-mean of its 4 smallest d_ij^2),   delta_i = min d_ij over denser j

d^2 the squared distance over D, i itself included. The anchors a of one frame then take in the rest of the segment,
the anchors of its other frames included: every token b goes to the anchor with the highest cosine, in each frame of
anchors,

    a <- w a + (1 - w) mean of its n tokens b,   w = max(1 / (n + 1), beta)

Followed is the released code for LLaVA-Video (github.com/LunarShen/FastVID, commit a40a109), which the authors call the
straightforward one; that for LLaVA-OneVision scores all frames at once, lets anchors of their own frame join the mean,
and rounds the number of anchors down frame by frame. Where the released code rounds a frame's share down, the budget is
exact here: frames get their shares rounded up or down, evenly over time. Anchors that a frame has no tokens left for
become tokens of attention (at large budgets). Density has no random part here; the lower index counts as denser. Frames
are described by the mean of their tokens, as in the code for Qwen2.5-VL; for LLaVA it reads the output of SigLIP's
pooling head. Several videos are cut between each other. Newlines are not tokens here, and stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize, one_hot, pad

from espalier.methods.base import Mixture, Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import require, require_finite
from espalier.methods.select.density import density_peaks, squared_distances
from espalier.methods.select.frames import Frames, spread
from espalier.methods.select.quotas import apportion
from espalier.methods.select.topk import top

#: Neighbours of a token's density.
NEAR = 4


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

        The engine's product adds O(keep N D). The device is waited for a few times in every frame.
        """
        attention = require_finite(view.signals["cls_attention"].float(), "attention")
        if keep == view.tokens.shape[1]:
            return Plan(torch.arange(keep, device=attention.device).expand(len(attention), keep))
        frames = Frames.of(view.grid)
        quotas = spread(frames.size, frames.size.new_full((len(attention), 1), keep))
        rows = []
        for number, row_attention in enumerate(attention):
            present = frames.size[number] > 0
            tables = (frames.size, quotas, frames.place)
            rows.append(
                self._row(
                    view.tokens[number].float(),
                    row_attention,
                    *(table[number, present] for table in tables),
                )
            )
        kept, matrices = (torch.stack(parts) for parts in zip(*rows, strict=True))
        return Plan(kept, Mixture(matrices), scores=attention)

    def _row(
        self, tokens: Tensor, attention: Tensor, sizes: Tensor, quotas: Tensor, place: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (K,) kept tokens of one sample, ascending, and (K, N) their mixture."""
        kept, matrices = [], []
        starts = [0, *sizes.cumsum(dim=0).tolist()]
        for first, last in pairwise((0, *self.ends(tokens, sizes, place))):
            inside = slice(starts[first], starts[last])
            segment_sizes, total = sizes[first:last].tolist(), int(quotas[first:last].sum())
            segment = self.segment(tokens[inside], attention[inside], segment_sizes, total)
            kept.append(segment[0] + inside.start)
            matrices.append(pad(segment[1], (inside.start, len(tokens) - inside.stop)))
        return torch.cat(kept), torch.cat(matrices)

    def ends(self, tokens: Tensor, sizes: Tensor, place: Tensor) -> list[int]:
        """Return the number of frames up to the end of each segment, ascending.

        Args:
            tokens: (N, D) of one sample.
            sizes: (F,) tokens of each frame.
            place: (F,) number of each frame in its video.
        """
        frame = torch.arange(len(sizes), device=tokens.device).repeat_interleave(sizes)
        sums = tokens.new_zeros(len(sizes), tokens.shape[1]).index_add(0, frame, tokens)
        means = require_finite(sums / sizes.unsqueeze(1), "tokens")
        alike = cosine_similarity(means[:-1], means[1:], dim=1)
        cuts = (alike < self.tau) | (place[1:] == 0)
        cuts[alike.argsort(stable=True)[: self.c - 1]] = True
        return [*(cuts.nonzero()[:, 0] + 1).tolist(), len(sizes)]

    def segment(
        self, tokens: Tensor, attention: Tensor, sizes: Sequence[int], total: int
    ) -> tuple[Tensor, Tensor]:
        """Return (total,) kept tokens of a segment, ascending, and (total, M) their mixture of its M tokens."""
        salient, anchors = self.shares(sizes, total)
        stays = torch.zeros_like(attention, dtype=torch.bool)
        starts = [0, *accumulate(sizes)]
        for start, end, count in zip(starts, starts[1:], salient, strict=False):
            stays[start + top(attention[None, start:end], count)[0]] = True
        groups = [
            start + dense(tokens[start:end], ~stays[start:end], count)
            for start, end, count in zip(starts, starts[1:], anchors, strict=False)
            if count
        ]
        kept = torch.cat([stays.nonzero()[:, 0], *groups]).sort().values
        matrix = one_hot(kept, len(tokens)).float()
        units = normalize(tokens, dim=1)
        for group in groups:
            joins = (~stays).index_fill(0, group, False).nonzero()[:, 0]
            member = one_hot((units[joins] @ units[group].T).argmax(dim=1), len(group)).float()
            number = member.sum(dim=0)
            weight = (1 / (number + 1)).clamp(min=self.beta)
            row = torch.searchsorted(kept, group)
            share = (1 - weight) / number.clamp(min=1)
            matrix[row.unsqueeze(1), joins] = (member * share).T
            matrix[row, group] = torch.where(number > 0, weight, 1)
        return kept, matrix

    def shares(self, sizes: Sequence[int], total: int) -> tuple[list[int], list[int]]:
        """Return how many tokens each frame of a segment keeps by attention, and how many anchors it has."""
        # The small term keeps 0.3 * 10 from becoming 2.999...
        n_anchors, m = math.floor(self.d * total + 1e-9), len(sizes)
        salient = map(min, even(total - n_anchors, m), sizes)
        frames, anchors = range(m - 1, -1, -self.p), [0] * m
        for frame, count in zip(frames, even(n_anchors, len(frames)), strict=True):
            anchors[frame] = count
        chosen = torch.tensor(list(salient))
        wanted = torch.tensor(anchors).minimum(torch.tensor(sizes) - chosen)
        room = (torch.tensor(sizes) - chosen - wanted).unsqueeze(0)
        missing = total - int((chosen + wanted).sum())
        return (chosen + apportion(room, room, missing)[0]).tolist(), wanted.tolist()


def even(total: int, parts: int) -> list[int]:
    """Return `parts` integers with sum `total` that differ by one at most, the larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def dense(tokens: Tensor, free: Tensor, count: int) -> Tensor:
    """Return (count,) density peaks among the free tokens (n,) of one frame (n, D)."""
    index = free.nonzero()[:, 0]
    squared = squared_distances(tokens[index].unsqueeze(0))
    return index[density_peaks(squared, count, min(NEAR, len(index)))[0]]
