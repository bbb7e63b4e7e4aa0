"""STTM: "Multi-Granular Spatio-Temporal Token Merging" (Hyun et al., ICCV 2025, arXiv 2507.07990).

Acts before decoder layer `layer` on every video. **Space.** Each frame is a quadtree, halved until a side has 2 cells.
x of a cell is the mean of its parts, 1 to 4 cells of the finer level. From level `root` on, counted from the coarsest,

    a cell stays whole  if  cos(x, x_p) >= tau_space for all its parts p,

and is otherwise split into its parts. An odd side leaves the first row or column by itself. **Time.** Cells of frames
t and t + 1 that overlap, equal ones or one inside the other, merge if

    cos(x, x') >= tau_time

into their mean, one vote for a cell, which stands at the first token of the first cell.

tau_space and tau_time set the count, and results state the achieved one. By default tau_time is solved for the budget:
each cell is paired with the most similar one in the frame before, and the most similar pairs merge until the count is
exact. Where space alone leaves fewer, the least similar cells are split until there are enough (so tau_space = -1
splits as far as the budget needs); where the first frame has more cells than the budget, each of them is paired with
the cell before it.

Differs: followed is the released code (github.com/HYUNJS/STTM, commit 00736c79); the paper's text was not compared. It
sets both thresholds by model and data set, 0.75 to 0.95 and 0.5 to 0.9 for 30 and 50 % of the tokens, before layer 2
(layer 0 of 72B models). Two details of the code are kept here: a cell with fewer than four parts, at an odd side, is
compared with the frame's first cell of the finer level as well, and merging passes a cell's label on until no label
points on, so that a cell with two pairs before it joins both only in videos where a chain takes a second pass. Its
options (weighted means, similarity by head) are not in its published commands. It pools in the model's precision, here
in fp32. Positions close up, as in the code for LLaVA. Pictures and views are videos of one frame; the videos share the
budget by their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from espalier.methods.base import Plan, Positions, Site, TokenReducer, View
from espalier.methods.checks import early_site, require, require_finite
from espalier.methods.select import stills
from espalier.methods.select.linkage import first_labels, likest_pairs
from espalier.methods.select.quadtree import cells
from espalier.methods.select.similarity import unit


@dataclass(frozen=True)
class STTM(TokenReducer):
    """Merges alike tokens of a frame by a quadtree, and overlapping cells of consecutive frames.

    Attributes:
        tau_space: cosine of all parts from which a cell stays whole.
        tau_time: cosine from which overlapping cells of consecutive frames merge; null: solved for the budget.
        layer: decoder layer before which tokens merge; 0: before the decoder.
        root: level at which quadtrees begin; 0: two cells a side.
    """

    tau_space: float = 0.85
    tau_time: float | None = None
    layer: int = 2
    root: int = 1

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        space, time = self.tau_space, self.tau_time
        require(-1 <= space <= 1, "tau_space", space, "a cosine, -1 to 1")
        require(time is None or -1 <= time <= 1, "tau_time", time, "a cosine, -1 to 1, or null")
        require(self.root >= 0, "root", self.root, "0 or more")

    @property
    def adaptive(self) -> bool:
        """Whether thresholds set the count."""
        return self.tau_time is not None

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the site before `layer`, or the prefix."""
        return (early_site(self.layer, depth),)

    @property
    def takes_remainder(self) -> bool:
        """Whether it may act after another method: its trees are of whole frames."""
        return False

    def needs_frames(self) -> bool:
        """Return true: frames are compared."""
        return True

    def positions(self, depth: int) -> Positions:
        """Return `renumbered`: the released code closes the gaps."""
        del depth
        return "renumbered"

    def plan(self, view: View, keep: int) -> Plan:
        """Merge every video by itself.

        Cost: O(N (D + log N)), with the cosine of two cells computed once for each token: 1.0 of X X^T at 576 tokens,
        0.3 at 2,880. A few device synchronisations in every video.
        """
        tokens = require_finite(view.tokens.float(), "tokens")
        image, tile = view.grid[:, :, :1], view.grid[:, :, 1:2]
        frames = torch.cat([image * (tile.amax() + 1) + tile, view.grid[:, :, 1:]], dim=2)
        solved = not self.adaptive or keep >= tokens.shape[1]
        of_clip = partial(self.of_clip, solved=solved)
        return stills.plan_of_clips(frames, (tokens, frames), keep, of_clip, exact=solved)

    def of_clip(
        self, tokens: Tensor, grid: Tensor, keep: int, solved: bool
    ) -> tuple[Tensor, Tensor]:
        """Return (T n,) the token that each token of a clip (T, n, D) goes to, -1 for none, and its weight there."""
        flat, token = tokens.flatten(0, 1), torch.arange(grid[..., 0].numel(), device=grid.device)
        if solved and keep == 0:
            return torch.full_like(token, -1), flat.new_zeros(len(flat))
        rows = int(grid[0, -1, 2] - grid[0, 0, 2]) + 1
        board = tokens.unflatten(1, (rows, -1))
        corner, weight = cells(board, self.root, self.tau_space, keep if solved else 1)
        units = unit(torch.zeros_like(flat).index_add_(0, corner, flat * weight.unsqueeze(1)))
        before, after = corner[: -tokens.shape[1]], corner[tokens.shape[1] :]
        alike = (units[before] * units[after]).sum(dim=1)
        if solved or self.tau_time is None:
            pairs = likest_pairs(units, corner, alike, keep)
        else:
            pairs = before[alike >= self.tau_time], after[alike >= self.tau_time]
        into = first_labels(*pairs, len(flat))[corner]
        votes = torch.bincount(into[corner == token], minlength=len(flat))
        return into, weight / votes[into]
