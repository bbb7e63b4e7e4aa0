"""High-resolution images by hand: a global view, then crops stitched to one plane, for tests of what deals them out."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from espalier.harness.specs.comparable import grouped
from espalier.methods.base import TokenReducer, View
from tests.methods.cases import BLOCKS, DEPTH, random_signal


def cropped(
    side: int = 4, shape: tuple[int, int] = (0, 0), cut: tuple[int, int] = (0, 0), image: int = 0
) -> tuple[Tensor, Tensor]:
    """Return coordinates (N, 4) and crops (N,) of one image.

    Args:
        side: tokens along the edge of the global view and of a crop.
        shape: rows and columns of crops, (0, 0) for none.
        cut: padded rows and columns of the plane that are cut off on either side.
        image: its number.
    """
    raster = [(row, column) for row in range(side) for column in range(side)]
    grid = [(image, 0, row, column) for row, column in raster]
    tile = [0] * len(raster)
    for row in range(cut[0], side * shape[0] - cut[0]):
        for column in range(cut[1], side * shape[1] - cut[1]):
            grid.append((image, 1, row - cut[0], column - cut[1]))
            tile.append(1 + (row // side) * shape[1] + column // side)
    return torch.tensor(grid), torch.tensor(tile)


def joined(*images: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return coordinates (1, N, 4) and crops (1, N) of one row of several images."""
    grids, tiles = zip(*images, strict=True)
    return torch.cat(grids).unsqueeze(0), torch.cat(tiles).unsqueeze(0)


#: Rows of images: with crops, with cut planes, of one view, and mixtures of these.
ROWS = {
    "square": joined(cropped(4, (2, 2))),
    "wide": joined(cropped(4, (1, 2))),
    "cut": joined(cropped(4, (2, 2), (1, 0))),
    "thin": joined(cropped(4, (2, 1), (0, 1)), cropped(4, (2, 2), (0, 2), image=1)),
    "one view": joined(cropped(6)),
    "mixed": joined(cropped(4), cropped(4, (3, 1), (2, 0), image=1), cropped(4, image=2)),
}


def groups(grid: Tensor, tile: Tensor) -> dict[tuple[int, int], list[int]]:
    """Return the tokens of each (image, crop) of one row, sorted by it."""
    crops = zip(grid[:, 0].tolist(), tile.tolist(), strict=True)
    return dict(sorted(grouped((crop, token) for token, crop in enumerate(crops)).items()))


def slow_apportion(weights: list[float], sizes: list[int], total: int) -> list[int]:
    """Deal out in rounds: whoever is full leaves, the others share what is left."""
    full: set[int] = set()
    while True:
        rest = total - sum(sizes[i] for i in full)
        over = sum(w for i, w in enumerate(weights) if i not in full)
        share = {
            i: rest * w / over for i, w in enumerate(weights) if i not in full and (over > 0 or w)
        }
        more = {i for i, value in share.items() if value > sizes[i] - 1e-9}
        if not more:
            break
        full |= more
    counts = [sizes[i] if i in full else int(share.get(i, 0) + 1e-9) for i in range(len(sizes))]
    by_remainder = sorted(share, key=lambda i: (-round(share[i] - counts[i], 7), i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def crops_with_shares(view: View, row: int, keep: int) -> Iterator[tuple[list[int], int]]:
    """Yield the tokens of each crop of a row, and how many of them stay if all crops keep the same share.

    Where the view has no crops, those of each image and tile.
    """
    tile = view.signals.get("tile", view.grid[..., 1])
    crops = list(groups(view.grid[row], tile[row]).values())
    sizes = [len(crop) for crop in crops]
    yield from zip(crops, slow_apportion(sizes, sizes, keep), strict=True)


def best(scores: Tensor, tokens: list[int], quota: int) -> list[int]:
    """Return the best of some tokens, the lower index first."""
    return sorted(tokens, key=lambda i: (-float(scores[i]), i))[:quota]


def over_crop(grid: Tensor, tile: Tensor, token: int) -> tuple[int, int] | None:
    """Return the (image, crop) over which a token of a global view lies, None where there are no crops."""
    image, _, row, column = grid[token].tolist()
    mine = grid[:, 0] == image
    whole, plane = grid[mine & (grid[:, 1] == 0)], grid[mine & (grid[:, 1] == 1)]
    if len(plane) == 0:
        return None
    (height, width), (tall, wide) = (
        [int(part[:, axis].max()) + 1 for axis in (2, 3)] for part in (whole, plane)
    )
    down, right = int((row + 0.5) / height * tall), int((column + 0.5) / width * wide)
    there = mine & (grid[:, 1] == 1) & (grid[:, 2] == down) & (grid[:, 3] == right)
    return image, int(tile[there])


def slow_sampled(grid: Tensor, values: Tensor) -> Tensor:
    """Return (N,) values of each image's global view, resized by torch to its plane of crops; its own in the view."""
    sampled = values.clone()
    for image in grid[:, 0].unique():
        whole, plane = ((grid[:, 0] == image) & (grid[:, 1] == view) for view in (0, 1))
        if plane.any():
            (height, width), size = (
                (grid[part, 2:].amax(dim=0) + 1).tolist() for part in (whole, plane)
            )
            sampled[plane] = interpolate(
                values[whole].view(1, 1, height, width), size, mode="bilinear", align_corners=False
            ).flatten()
    return sampled


def crop_view(method: TokenReducer, _keep: int, name: str, width: int = 6) -> View:
    """Return what a method is shown at its first site of a row of images, with random tokens and signals."""
    grid, tile = ROWS[name]
    site, n_tokens = method.all_sites(BLOCKS, DEPTH)[0], grid.shape[1]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(1, n_tokens, width, generator=generator)
    signals = {need.key: random_signal(need, 1, n_tokens, generator) for need in method.needs(site)}
    return View(site, tokens, grid, {**signals, "tile": tile})
