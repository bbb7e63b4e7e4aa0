"""Random tokens: the floor that a method must beat.

Uniform sampling without replacement, the same share in each image or tile. Every sample has its own generator, seeded
by the run's seed and the sample's id, so that the choice depends neither on the batch nor on the order of samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from espalier.methods.base import Plan, Site, TokenReducer, View
from espalier.methods.checks import early_site
from espalier.methods.select.tiles import top_in_tiles


@dataclass(frozen=True)
class Random(TokenReducer):
    """Keeps tokens at random.

    Attributes:
        layer: decoder layer before which tokens go; 0 is before the decoder. Set it to the layer of the method that
            this control is compared with.
    """

    layer: int = 0

    draws = True
    takes_separators = True  # chance alone, and which image or view a token is of

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix, or the site before `layer`."""
        return (early_site(self.layer, depth),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the tokens with the largest of N random numbers. Cost: O(N log N)."""
        n_tokens = view.tokens.shape[1]
        noise = torch.stack([torch.rand(n_tokens, generator=g) for g in view.generators])
        return Plan(top_in_tiles(noise.to(view.tokens.device), view.grid, keep))
