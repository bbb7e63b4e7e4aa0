"""Centre crop: the tokens around the middle of each picture.

Photographs put their subject in the middle, so that benchmarks of them reward a method that only looks there. With r
and c the row and column of a token in a view of H rows and W columns, both from 0, the tokens with the smallest

    ((2 r + 1 - H) / H)^2 + ((2 c + 1 - W) / W)^2

stay, equal ones by the lower index: an ellipse of the view's shape. Every view and every frame keeps the same share.
"""

from __future__ import annotations

from dataclasses import dataclass

from espalier.methods.base import Plan, Site, TokenReducer, View
from espalier.methods.checks import early_site
from espalier.methods.select.tiles import Tiles, top_in_tiles


@dataclass(frozen=True)
class Center(TokenReducer):
    """Keeps the tokens closest to the centre of their view.

    Attributes:
        layer: decoder layer before which tokens go; 0 is before the decoder.
    """

    layer: int = 0

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix, or the site before `layer`."""
        return (early_site(self.layer, depth),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the tokens closest to the centre. Cost: O(N log N)."""
        tiles = Tiles.of(view.grid)
        rows, columns = tiles.of_token(tiles.height), tiles.of_token(tiles.width)
        down, right = (2 * view.grid[:, :, axis] + 1 for axis in (2, 3))
        distance = ((down - rows) / rows).square() + ((right - columns) / columns).square()
        return Plan(top_in_tiles(-distance, view.grid, keep))
