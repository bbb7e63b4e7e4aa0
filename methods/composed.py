"""Two methods on one prompt: a reducer drops tokens, then a compressor evicts cache entries of the remaining ones."""

from __future__ import annotations

from dataclasses import dataclass

from espalier.methods.base import Method, Need, Site, TokenReducer
from espalier.methods.compressor import CacheCompressor


@dataclass(frozen=True)
class Composed(Method):
    """A reducer and a compressor.

    Attributes:
        reducer: shortens the prompt; the run's budget is its own.
        compressor: evicts entries of the remaining tokens.
        cache_ratio: share of these that goes.
    """

    reducer: TokenReducer
    compressor: CacheCompressor
    cache_ratio: float = 0.0

    @property
    def takes_separators(self) -> bool:
        """Whether both methods take them."""
        return all(part.takes_separators for part in self.parts)

    @property
    def parts(self) -> tuple[Method, ...]:
        """Return both, in the order in which they act."""
        return (self.reducer, self.compressor)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the sites of both around the decoder, in the order in which they act."""
        return self.reducer.sites(depth) + self.compressor.sites(depth)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the needs of the method that acts at `site`."""
        return (self.compressor if site.where == "cache" else self.reducer).needs(site)

    def read_sites(self, blocks: int, depth: int) -> tuple[Site, ...]:
        """Return the sites where either method reads."""
        reducer, compressor = self.reducer, self.compressor
        return reducer.read_sites(blocks, depth) + compressor.read_sites(blocks, depth)
