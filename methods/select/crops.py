"""High-resolution images: the tokens of the global view and of each crop, and the crops' regions in the view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from espalier.methods.checks import Condition, require_all
from espalier.methods.views import MethodError

UNSTITCHED = (
    "this method must know where the crops lie in the image, and this model does not stitch them to one plane; valid: "
    "images of one view, models with stitched crops"
)


@dataclass(frozen=True)
class Crops:
    """The partition of the tokens by (image, crop); an image's global view counts as its first crop.

    Tables have N columns, one for each crop there could be; absent crops have size 0.

    Attributes:
        grid: (B, N, 4) coordinates of the tokens: image, view, row, column.
        index: (B, N) running number of each token's crop, images one after the other.
        size: (B, N) table, tokens of each crop.
        image: (B, N) table, image of each crop.
        is_overview: (B, N) table, whether a crop is a global view.
    """

    grid: Tensor
    index: Tensor
    size: Tensor
    image: Tensor
    is_overview: Tensor

    @classmethod
    def of(cls, grid: Tensor, tile: Tensor) -> Crops:
        """Read the crops off the coordinates (B, N, 4) and the signal `tile` (B, N). Cost: O(N log N)."""
        image, tile = grid[:, :, 0].long(), tile.long()
        key, order = (image * (tile.amax(dim=1, keepdim=True) + 1) + tile).sort(dim=1, stable=True)
        number = pad((key[:, 1:] != key[:, :-1]).long().cumsum(dim=1), (1, 0))
        index = torch.zeros_like(order).scatter(1, order, number)
        empty = torch.zeros_like(index)
        return cls(
            grid=grid,
            index=index,
            size=empty.scatter_add(1, index, torch.ones_like(index)),
            image=empty.scatter_reduce(1, index, image, "amax"),
            is_overview=empty.scatter_reduce(1, index, (tile == 0).long(), "amax").bool(),
        )

    def of_token(self, table: Tensor) -> Tensor:
        """Return (B, N) the entry of each token's crop."""
        return table.gather(1, self.index)

    def sums(self, values: Tensor, crop: Tensor) -> Tensor:
        """Return the table of sums of `values` (B, N) by `crop` (B, N), in fp64: summation order has no effect."""
        return torch.zeros_like(values, dtype=torch.double).scatter_add(1, crop, values.double())

    def over_image(self, table: Tensor, reduce: Literal["sum", "amax"] = "sum") -> Tensor:
        """Return the table of the reduced entries of each image's crops, the same for all crops of an image."""
        reduced = torch.zeros_like(table).scatter_reduce(
            1, self.image, table, reduce, include_self=reduce == "sum"
        )
        return reduced.gather(1, self.image)

    def weights(self, importance: Tensor, overview_share: Tensor | float) -> Tensor:
        """Return the table of weights by which `keep` is distributed, as numbers of tokens if everything were kept.

        Every image gets as many as it has tokens. Its global view gets the share `overview_share`, all of them
        if there are no crops; the crops get the rest, each in proportion to its `importance` (a table, 0 or more). The
        share is one number, or a table that holds an image's for each of its crops.
        """
        importance = (importance * (~self.is_overview & (self.size > 0))).double()
        tokens, crops = (
            self.over_image(self.size).double(),
            self.over_image((~self.is_overview) * self.size),
        )
        share = torch.as_tensor(overview_share, dtype=torch.double, device=tokens.device)
        share = torch.where(crops > 0, share, 1.0)
        split = importance / self.over_image(importance).clamp(min=1e-300)
        return torch.where(self.is_overview, share, (1 - share) * split) * tokens * (self.size > 0)


@dataclass(frozen=True)
class Regions:
    """Regions of the crops in the global view of their image.

    The global view is assumed to show the whole image, stretched to its own shape, and the plane of stitched crops the
    same image without padding: so relative positions are the same in both.

    Attributes:
        crops: the partition.
        covered: (B, N) whether a token lies in the global view of an image with crops.
        below: (B, N) crop over which each covered token lies; of other tokens, their own.
        overview: first token, height and width of the global view of each token's image, (B, N) each.
        plane: the same of the stitched crops; height 0 where there are none.
    """

    crops: Crops
    covered: Tensor
    below: Tensor
    overview: tuple[Tensor, Tensor, Tensor]
    plane: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, crops: Crops) -> Regions:
        """Lay the crops over the global views. Cost: O(N).

        Raises:
            MethodError: the model does not stitch crops, so their regions are unknown; read as in `require_all`.
        """
        _, view, row, column = crops.grid.long().unbind(dim=2)
        require_all([Condition((view <= 1).all(), lambda: MethodError(UNSTITCHED))])
        overview, plane = (_rectangle(crops.grid, view == number) for number in (0, 1))
        covered = (view == 0) & (plane[1] > 0)
        start, height, width = plane
        # The token of the plane under the middle of the cell.
        down = (2 * row + 1) * height // (2 * overview[1]).clamp(min=1)
        right = (2 * column + 1) * width // (2 * overview[2]).clamp(min=1)
        under = torch.where(covered, start + down * width + right, 0)
        below = torch.where(covered, crops.index.gather(1, under), crops.index)
        return cls(crops, covered, below, overview, plane)

    def stripes(self) -> Tensor:
        """Return `below` as if crop k of n lay over the k-th of n equal runs of the global view's raster order."""
        _, height, width = self.overview
        row, column = self.crops.grid[:, :, 2].long(), self.crops.grid[:, :, 3].long()
        crops = self.crops.over_image(((~self.crops.is_overview) & (self.crops.size > 0)).long())
        cells = (height * width).clamp(min=1)
        run = (row * width + column) * self.crops.of_token(crops) // cells
        return self.crops.index + torch.where(self.covered, 1 + run, 0)

    def sampled(self, values: Tensor) -> Tensor:
        """Return (B, N) `values` of the global view where each token of a crop lies, interpolated bilinearly.

        The whole view is resized to the plane of stitched crops (align_corners=False); crops share its values across
        their borders. Tokens of a global view keep their own values.
        """
        _, view, row, column = self.crops.grid.long().unbind(dim=2)
        start, height, width = self.overview
        cropped = view > 0
        up, down, y = _between(row, height, self.plane[1])
        before, after, x = _between(column, width, self.plane[2])

        def at(line: Tensor, place: Tensor) -> Tensor:
            return values.gather(1, torch.where(cropped, start + line * width + place, 0))

        above = torch.lerp(at(up, before), at(up, after), x)
        under = torch.lerp(at(down, before), at(down, after), x)
        return torch.where(cropped, torch.lerp(above, under, y), values)


def _between(place: Tensor, length: Tensor, plane: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lines of the global view on either side of each line of the plane, and the weight of the second."""
    exact = (place + 0.5) * length / plane.clamp(min=1) - 0.5
    exact = torch.minimum(exact, (length - 1).float()).clamp(min=0)
    before = exact.floor().long()
    return before, torch.minimum(before + 1, length - 1), exact - before


def _rectangle(grid: Tensor, inside: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return first token, height and width of the area marked by `inside` (B, N) in each token's image, (B, N) each."""
    image, _, row, column = grid.long().unbind(dim=2)
    n_tokens = image.shape[1]
    place = torch.where(inside, torch.arange(n_tokens, device=image.device), n_tokens)
    start = torch.full_like(image, n_tokens).scatter_reduce(1, image, place, "amin")
    height, width = (
        torch.zeros_like(image).scatter_reduce(1, image, torch.where(inside, axis + 1, 0), "amax")
        for axis in (row, column)
    )
    return start.gather(1, image), height.gather(1, image), width.gather(1, image)
