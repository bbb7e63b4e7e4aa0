"""ToMe: "Token Merging: Your ViT But Faster" (Bolya et al., ICLR 2023, arXiv 2210.09461).

Acts inside every block of the vision tower, between attention and MLP. The tokens are split alternately into A (even
places) and B (odd places); k is the key of this block, mean over heads, and s_j how many patches token j stands for:

    1. b(a) = argmax over B of cos(k_a, k_b)
    2. the r tokens of A with the highest cosine to their b(a) are merged into it
    3. x'_b = (s_b x_b + sum_a s_a x_a) / (s_b + sum_a s_a),    s'_b = s_b + sum_a s_a
    4. the following blocks attend with softmax(q k^T / sqrt d + log s)             proportional attention

Equal cosines go to the lower index. A block merges half of its tokens at most. r follows from the budget: the same in
every block, as in the paper, until fewer than 2r tokens are left; from there on each block halves them. L blocks leave
2^-L of the tokens, and a higher ratio is refused. (Pictures that share a budget may round to a little more than half;
such a block repeats steps 1 and 2 on what it has, with the mean keys of merged tokens.)

A class token is neither merged nor merged into. The paper does not state the order in which tokens alternate:

    raster      in every block by their order in the raster; a class token has no place: patch 0 is in A
    released    as in the released code. A class token has place 0, so that patch 0 is in B, and the pairs differ from
                the first block on. The next block alternates in the order of this one's output: the remainder of A
                before all of B, the remainder ordered by place, without a class token by descending cosine. Without a
                class token, the first block's pairs are the same in both orders.

Differs: either way a merged token leaves the tower at b's place in the raster, also for its grid position; the released
code, made for classifiers, keeps its own order, which no projector or language model was trained on.

Ports to language models average the tokens of each merge without regard to sizes and attend as before:
`weighted=false`, `proportional=false`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from espalier.methods.base import Assignment, Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import require_choices, require_finite
from espalier.methods.select.bipartite import merge_to, shares

Order = Literal["raster", "released"]


@dataclass(frozen=True)
class ToMe(TokenReducer):
    """Merges, block by block of the tower, the patches with similar keys.

    Attributes:
        proportional: step 4.
        weighted: weigh tokens by their sizes in step 3; false: all the same.
        order: in which order tokens alternate between A and B, `raster` or `released`.
    """

    proportional: bool = True
    weighted: bool = True
    order: Order = "raster"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require_choices(self, order=Order)

    def tower_sites(self, blocks: int) -> tuple[Site, ...]:
        """Return a site in every block."""
        return tuple(Site("tower", block) for block in range(blocks))

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return no site: the method acts before the decoder."""
        del depth
        return ()

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        """Return a straight line from 1 to `share`, or twice what the next block leaves where that is lower.

        No share is below 1/2 in the first block, 1/4 in the second and so on: less is out of reach.
        """
        end = max(share, 0.5**n_sites)
        to_go = range(n_sites - 1, -1, -1)  # blocks still to come after each site
        return tuple(min(end + (1 - end) * n / n_sites, end * 2.0**n) for n in to_go)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the keys of the site's block, sizes if they weigh, and the sequence if it is not the raster."""
        del site
        sizes = (Need("sizes"),) if self.weighted else ()
        sequence = (Need("sequence"),) if self.order == "released" else ()
        return (Need("block_keys"), *sizes, *sequence)

    def plan(self, view: View, keep: int) -> Plan:
        """Merge down to `keep`. Cost: O(N^2 Dk / 4), and at most a third more if over half of the tokens go."""
        keys = view.signals["block_keys"]
        sizes = torch.ones(keys.shape[:2], device=keys.device)
        if self.weighted:
            sizes = require_finite(view.signals["sizes"].float(), "sizes")
        sequence = view.signals["sequence"].long() if self.order == "released" else None
        kept, slot, remaining = merge_to(keys, sizes, keep, sequence)
        order = None if remaining is None else remaining[:, remaining.shape[1] - keep :]
        if keep == keys.shape[1]:
            return Plan(kept, order=order)
        return Plan(kept, Assignment(slot, shares(slot, sizes)), order=order)
