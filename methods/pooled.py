"""Area pooling: what a smaller image would have given, at an equal token count.

The patch grid is cut into exactly `keep` contiguous regions, in bands of rows and runs of columns, image by image
and tile by tile (`select.tiles.regions`). Each region becomes the mean of its projected tokens, at the place of
its central token. The same regions as `uniform`, so the two differ by averaging alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from espalier.methods.base import Assignment, Plan, Site, TokenReducer, View
from espalier.methods.select.merge import slot_sizes
from espalier.methods.select.tiles import regions


@dataclass(frozen=True)
class Pooled(TokenReducer):
    """Replaces each of `keep` regions of the grid by its mean."""

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix: averages of hidden states inside the decoder would mix positions."""
        del depth
        return (Site("prefix"),)

    def plan(self, view: View, keep: int) -> Plan:
        """Merge every token into its region with equal weight. Cost: O(N log N + N D)."""
        slot, centre = regions(view.grid, keep)
        weight = 1 / slot_sizes(slot).clamp(min=1)  # a slot of -1 is dropped whatever its weight
        return Plan(centre, Assignment(slot, weight))
