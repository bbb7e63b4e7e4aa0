"""LLaVA-Scissor: "Token Compression with Semantic Connected Components for Video LLMs" (2025, arXiv 2506.21862).

Tokens are connected if their cosine is above tau, directly or over others. With the components (SCC)

    space  of the tokens of each frame: their means m_c
    time   of all the m_c of the video: their means r_k of the m_c

every token x_j of the video goes to the r_k with the highest cosine, and there goes on

    z_k = (r_k + sum of the x_j) / (1 + number of the x_j)

tau sets the number of the z_k. Here it is solved for the budget (null), by bisection: a hundredth that leaves as many
or more, where the one below leaves fewer. Then the likest components of time join below tau until the count is exact.
For a tau that leaves fewer in space alone, the least similar links of space do not count.

Differs: followed is the released code (github.com/HumanMLLM/LLaVA-Scissor, commit b63354c8), where tau is 0.9 and is
moved by hand; the paper's text was not compared. The code compares a sample of ln(n) / 0.05^2 of n points with all
others, so that it finds all pairs of up to about 3,200 points; here all pairs count. Its union-find can leave points
out of a mean which are linked to the root of their component over others; here all of a component count. z_k stands
where the code sorts it to, at the point with the most pairs above tau, the first of equals. Several videos of a prompt
share the budget by their tokens; a picture is a video of one frame. Newlines stay; the code has none.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.methods.base import Mixture, Plan, Site, TokenReducer, View
from espalier.methods.checks import require, require_finite
from espalier.methods.select.frames import clips
from espalier.methods.select.linkage import ConnectedParts, count_components, likest_tree
from espalier.methods.select.similarity import cosine


@dataclass(frozen=True)
class Scissor(TokenReducer):
    """Merges what is connected by similarity, in each frame and then over the video.

    Attributes:
        tau: cosine above which two tokens are connected; null: solved for the budget.
    """

    tau: float | None = None

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        valid = "a cosine, -1 to 1, or null"
        require(self.tau is None or -1 <= self.tau <= 1, "tau", self.tau, valid)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix."""
        del depth
        return (Site("prefix"),)

    def needs_frames(self) -> bool:
        """Return true: frames are compared."""
        return True

    def plan(self, view: View, keep: int) -> Plan:
        """Merge every video by itself.

        Cost: O(N^2 D / 2) for the similarities, a few passes over N^2 numbers for each of up to 8 tau, N steps of O(N)
        for the exact count and O(keep N D) for merging: 2.5 of X X^T with half of the tokens kept. Every tau and
        pass waits for the device.
        """
        tokens = require_finite(view.tokens.float(), "tokens")
        kept = torch.zeros_like(view.grid[:, :keep, 0])
        matrix = tokens.new_zeros(len(tokens), keep, tokens.shape[1])
        for row, videos in enumerate(clips(view.grid, keep)):
            done = 0
            for clip in videos:
                slots = slice(done, done + clip.keep)
                if clip.keep:
                    places, mixed = self.of_clip(clip.of(tokens[row]), clip.keep)
                    kept[row, slots] = clip.span.start + places
                    matrix[row, slots, clip.span] = mixed
                done = slots.stop
        return Plan(kept, Mixture(matrix))

    def of_clip(self, tokens: Tensor, keep: int) -> tuple[Tensor, Tensor]:
        """Return (keep,) the tokens of a clip (T, n, D) that stay, and (keep, T n) what each becomes."""
        n_frames, size, _ = tokens.shape
        flat = tokens.flatten(0, 1)
        alike, lengths = cosine(flat.unsqueeze(0))[0], flat.norm(dim=1)
        blocks = alike.view(n_frames, size, n_frames, size).diagonal(dim1=0, dim2=2)
        frames = blocks.permute(2, 0, 1).clone()
        products = alike.mul_(lengths).mul_(lengths.unsqueeze(1))
        tree = likest_tree(frames)
        starts = torch.arange(0, len(flat), size, device=tokens.device).unsqueeze(1)

        def space(tau: float) -> ConnectedParts:
            n_links = min(int((tree.likeness > tau).sum()), len(flat) - keep)
            root = (tree.roots(tree.likest(n_links)) + starts).flatten()
            return ConnectedParts.of(root, (frames > tau).sum(dim=2).flatten())

        def n_means(hundredth: int) -> int:
            tau = hundredth / 100
            if int((tree.likeness <= tau).sum()) < keep:  # components of space
                return 0
            return count_components(space(tau).compared(products)[0] > tau)

        tau = self.tau
        if tau is None:
            tau = (bisect_left(range(-100, 101), keep, key=n_means) - 100) / 100
        means = space(tau)
        alike, _ = means.compared(products)
        time = likest_tree(alike.unsqueeze(0))
        root = time.roots(time.likest(len(alike) - keep))[0]
        means = means.joined(ConnectedParts.of(root, (alike > tau).sum(dim=1)))
        _, with_tokens = means.compared(products)
        into, token = with_tokens.argmax(dim=0), torch.arange(len(flat), device=tokens.device)
        mixed = products.new_zeros(keep, len(flat))
        mixed[means.label, token] = means.weight
        mixed[into, token] += 1
        return means.places, mixed / (1 + torch.bincount(into, minlength=keep)).unsqueeze(1)
