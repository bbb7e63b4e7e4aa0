"""Uniform stride: tokens spread evenly over the patch grid, whatever the image shows.

A stride over the flat raster order would line up with the width of the grid and keep whole columns. Here the grid
is cut into exactly `keep` regions of nearly equal size, in bands of rows and runs of columns
(`select.tiles.regions`), and the central token of each is kept: the count is exact, and spacing is as even in both
directions as the count allows.
"""

from __future__ import annotations

from dataclasses import dataclass

from espalier.methods.base import Plan, Site, TokenReducer, View
from espalier.methods.checks import early_site
from espalier.methods.select.tiles import regions


@dataclass(frozen=True)
class Uniform(TokenReducer):
    """Keeps the central token of each of `keep` regions of the grid.

    Attributes:
        layer: decoder layer before which tokens go; 0 is before the decoder.
    """

    layer: int = 0

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix, or the site before `layer`."""
        return (early_site(self.layer, depth),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the centres. Cost: O(N log N)."""
        _, centre = regions(view.grid, keep)
        return Plan(centre)
