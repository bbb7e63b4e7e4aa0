"""PixelPrune: "Pixel-Level Adaptive Visual Token Reduction via Predictive Coding" (arXiv 2604.00886, 2026).

Acts before the first block of the vision tower, on pixels x in [0, 1]. Each patch X is predicted from its neighbours on
the left, A, above, B, and above on the left, C, by the rule of JPEG-LS with equality up to `tau`:

    p = B if C ~ A and not C ~ B, else A;    X ~ Y if max |x - y| <= tau

in the first row A, in the first column B. The patches with the largest error max |x - p| stay, the first one always:
what is left out repeats its neighbour, up to the largest error that is left out.

Differs: followed is the released code (github.com/OPPO-Mente-Lab/PixelPrune, commit a870e31b, `pred_2d` with the metric
`max`); the paper's text was not compared. There `tau` alone decides how many stay, those with an error above it; here a
count belongs to the budget, and the same patches stay if it is theirs. Tokens that a smaller `tau` would leave out are
reported as spare. For `tau` above 0 the code compares with the values that a decoder would have (`anchored`), which
depend on what has been left out before; here, as with its `anchored=False`, with the pixels. The code prunes units of 2
x 2 patches of Qwen3-VL and Qwen3.5, towers in which methods cannot act here; the towers that allow it have tokens of
one patch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import read, require, require_finite
from espalier.methods.select.topk import top

#: Error of a patch that has no neighbour: above all differences of pixels in [0, 1].
UNPREDICTED = 2.0


@dataclass(frozen=True)
class PixelPrune(TokenReducer):
    """Drops the patches that their neighbours predict, before the tower.

    Attributes:
        tau: largest difference of pixels in [0, 1] that counts as equal.
    """

    tau: float = 0.0

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(0 <= self.tau <= 1, "tau", self.tau, "a number from 0 to 1")

    def tower_sites(self, blocks: int) -> tuple[Site, ...]:
        """Return the input of block 0."""
        del blocks
        return (Site("tower", -1),)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return no site: the method acts before the decoder."""
        del depth
        return ()

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the pixels."""
        del site
        return (Need("pixels"),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the patches with the largest errors. Cost: O(N F), F numbers in a patch, and O(N log N)."""
        pixels = require_finite(view.signals["pixels"], "pixels").float()
        errors = prediction_errors(pixels, view.grid[..., 2:], self.tau)
        kept = top(errors, keep)
        return Plan(kept, spare=(errors.gather(1, kept) <= self.tau).sum(1), scores=errors)


def prediction_errors(pixels: Tensor, places: Tensor, tau: float) -> Tensor:
    """Return (B, N) the largest error of each patch's prediction, `UNPREDICTED` for patches without a neighbour.

    Args:
        pixels: (B, N, F) of patches, in [0, 1].
        places: (B, N, 2) their row and column; no place occurs twice.
        tau: largest difference that counts as equal.
    """
    n_rows, n_columns = (read(places.flatten(0, 1).amax(0))[0] + 1).tolist()
    batch = torch.arange(len(pixels), device=pixels.device).unsqueeze(1)
    row, column = places.unbind(-1)
    number = torch.full((len(pixels), n_rows + 1, n_columns + 1), -1, device=pixels.device)
    number[batch, row + 1, column + 1] = torch.arange(pixels.shape[1], device=pixels.device)
    left_patch, above, corner = (
        number[batch, row + down, column + right] for down, right in ((1, 0), (0, 1), (0, 0))
    )

    def difference(first: Tensor, second: Tensor) -> Tensor:
        # Of missing patches the last one's, which nothing reads.
        return (pixels[batch, first] - pixels[batch, second]).abs().amax(2)

    edge = (
        (difference(corner, left_patch) <= tau) & (difference(corner, above) > tau) & (corner >= 0)
    )
    from_above = (edge & (above >= 0)) | (left_patch < 0)
    predictor = torch.where(from_above, above, left_patch)
    itself = torch.arange(pixels.shape[1], device=pixels.device).expand_as(row)
    return difference(itself, predictor).masked_fill(predictor < 0, UNPREDICTED)
