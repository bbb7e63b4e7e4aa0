"""Edges: the share of a patch's pixels with a steep Sobel gradient."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from espalier.methods.checks import require_finite


def edge_share(luma: Tensor, tau: float, across_patches: bool) -> Tensor:
    """Return (B, N) the share of pixels with sqrt(Gx^2 + Gy^2) > tau, Gx and Gy by the 3 x 3 Sobel kernels.

    Args:
        luma: (B, N, h + 2, w + 2) patches with one pixel of border on each side.
        tau: threshold.
        across_patches: read the border, for the gradient of the whole picture; otherwise each patch is taken by itself,
            with zeros around it. Zeros are grey: patches of any other colour then have edges all around.

    Raises:
        MethodError: a value is NaN or infinite.

    Cost: O(N h w).
    """
    luma = require_finite(luma, "luma").float()
    if not across_patches:
        luma = pad(luma[..., 1:-1, 1:-1], (1, 1, 1, 1))
    down = luma[..., :-2, :] + 2 * luma[..., 1:-1, :] + luma[..., 2:, :]
    across = luma[..., :-2] + 2 * luma[..., 1:-1] + luma[..., 2:]
    along_x = down[..., 2:] - down[..., :-2]
    along_y = across[..., 2:, :] - across[..., :-2, :]
    steep = along_x.square() + along_y.square() > tau**2
    return steep.float().mean(dim=(2, 3))
