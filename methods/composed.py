"""Two methods on one prompt: two reducers, or a reducer and a compressor.

Of two reducers (`Combined`) the second acts later in the model, on the tokens that the first has left. The ratio of a
run is that of both together. By default each keeps the same share of what it gets, the square root of the share that
both keep; with `first_ratio` the first removes that share, and the second the rest.

A compressor (`Composed`) evicts cache entries of the tokens that a reducer, or two of them, have left.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from espalier.methods.base import (
    Method,
    MethodError,
    Need,
    Plan,
    Positions,
    Site,
    TokenReducer,
    View,
)
from espalier.methods.checks import require
from espalier.methods.compressor import CacheCompressor
from espalier.methods.views import BEFORE_DECODER


@dataclass(frozen=True)
class PartSite(Site):
    """A site of one of two methods, which sees it as a plain `Site`."""

    part: int = field(default=0, repr=False)

    @property
    def plain(self) -> Site:
        """The site as its method returned it."""
        return Site(self.where, self.layer, self.stage)


@dataclass(frozen=True)
class Combined(TokenReducer):
    """Two reducers, each at its own sites.

    Attributes:
        first: acts first.
        second: acts after the last site of the first, on what is left.
        first_ratio: share of all tokens that the first removes, but no more than both remove: at 0 the second acts
            alone, at 1 the first. None: each keeps the same share of what it gets.
    """

    first: TokenReducer
    second: TokenReducer
    first_ratio: float | None = None

    def __post_init__(self) -> None:
        """Check the pair, as far as no model is needed."""
        for part in self.parts:
            reduces = isinstance(part, TokenReducer) and part.in_one_prefill
            if not reduces or len(part.parts) > 1:
                raise MethodError(
                    f"{type(part).__name__} is no single method that drops tokens in one prefill; valid: two that are, "
                    "such as divprune+fastv; a cache compressor is compressor=<name>"
                )
        if type(self.first) is type(self.second):
            name = type(self.first).__name__
            raise MethodError(f"{name} is there twice; valid: two different methods")
        ratio = self.first_ratio
        in_range = ratio is None or 0 <= ratio <= 1
        require(in_range, "first_ratio", ratio, "null, or a number in [0, 1]")

    # ------------------------------------------------------------------ what the parts have together

    @property
    def parts(self) -> tuple[TokenReducer, ...]:
        """Return both, in the order in which they act."""
        return (self.first, self.second)

    @property
    def draws(self) -> bool:
        """Whether one of both does."""
        return self.first.draws or self.second.draws

    @property
    def takes_separators(self) -> bool:
        """Whether both methods take them."""
        return self.first.takes_separators and self.second.takes_separators

    @property
    def adaptive(self) -> bool:
        """Whether the second is; a first one is refused (`clash`)."""
        return self.second.adaptive

    @property
    def curved(self) -> bool:
        """Whether one of them is."""
        return self.first.curved or self.second.curved

    @property
    def proportional(self) -> bool:
        """Whether the one that acts in the tower weighs keys by sizes."""
        return self.first.proportional or self.second.proportional

    def needs_frames(self) -> bool:
        """Return whether one of them compares frames."""
        return self.first.needs_frames() or self.second.needs_frames()

    def positions(self, depth: int) -> Positions:
        """Return what both released codes do.

        Raises:
            MethodError: they differ, and a session does the same at all sites.
        """
        first, second = self.first.positions(depth), self.second.positions(depth)
        if first != second:
            raise MethodError(
                f"engine.positions='method': {type(self.first).__name__} is released with {first} positions, "
                f"{type(self.second).__name__} with {second} ones; valid: original, renumbered"
            )
        return first

    # ------------------------------------------------------------------ where they act

    def tower_sites(self, blocks: int) -> tuple[Site, ...]:
        """Return those of both."""
        return self._of_both(*(part.tower_sites(blocks) for part in self.parts))

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return those of both around the decoder."""
        return self._of_both(*(part.sites(depth) for part in self.parts))

    def _of_both(self, first: tuple[Site, ...], second: tuple[Site, ...]) -> tuple[Site, ...]:
        of_first = () if self.first_ratio == 0 else first
        of_second = () if self.first_ratio == 1 else second
        return (
            *(PartSite(site.where, site.layer, site.stage, 0) for site in of_first),
            *(PartSite(site.where, site.layer, site.stage, 1) for site in of_second),
        )

    def clash(self, blocks: int, depth: int) -> str | None:
        """Return why the second cannot act after the first in a tower and a decoder; None: it can."""
        names = [type(part).__name__ for part in self.parts]
        sites_of_both = []
        for name, part in zip(names, self.parts, strict=True):
            try:
                sites = part.all_sites(blocks, depth)
            except MethodError as error:
                raise MethodError(f"{name}: {error}") from error
            sites_of_both.append(sites)
            if not sites:
                return f"{name} drops nothing"
            if part.shrinks_pictures:
                return f"{name} makes the pictures smaller by the ratio of both"
            if part.decode_site(depth) is not None:
                return f"{name} chooses again at each decoding step"
        if self.first.adaptive:
            return f"{names[0]} chooses its own count, which leaves the budget of {names[1]} open"
        end, start = sites_of_both[0][-1], sites_of_both[1][0]
        if _order(start) == _order(end):
            return f"both act at {_named(start)}"
        if _order(start) < _order(end):
            return f"{names[1]} acts at {_named(start)}, before {names[0]} at {_named(end)}"
        by_place = start.where in BEFORE_DECODER and not self.second.takes_separators
        if by_place or not self.second.takes_remainder:
            return f"{names[1]} needs every token of the tower's grid"
        return None

    # ------------------------------------------------------------------ how much each keeps

    def shares(self, share: float, sites: tuple[Site, ...]) -> tuple[float, ...]:
        """Return the shares of all tokens after the first's sites, then after the second's."""
        n_first = sum(part_of(site) == 0 for site in sites)
        n_second = len(sites) - n_first
        kept = share**0.5 if self.first_ratio is None else max(share, 1 - self.first_ratio)
        of_first = self.first.fractions(kept, n_first) if n_first else ()
        remainder = of_first[-1] if of_first else 1.0
        of_second = self.second.fractions(min(1.0, share / remainder), n_second) if n_second else ()
        return (*of_first, *(remainder * fraction for fraction in of_second))

    def measured(self, view: View) -> TokenReducer | None:
        """Return the combination with what the acting method measures."""
        acting = self._acting(view.site)
        measured = acting.measured(_plain(view)) if acting.curved else None
        if measured is None:
            return None
        is_first = part_of(view.site) == 0
        return replace(self, first=measured) if is_first else replace(self, second=measured)

    # ------------------------------------------------------------------ what the acting method does

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the needs of the method that acts at `site`."""
        return self._acting(site).needs(_part_site(site).plain)

    def plan(self, view: View, keep: int) -> Plan:
        """Return the plan of the method that acts."""
        return self._acting(view.site).plan(_plain(view), keep)

    def answer(self, view: View, keep: int) -> Plan:
        """Return the checked plan of the method that acts, which errors name."""
        return self._acting(view.site).answer(_plain(view), keep)

    def _acting(self, site: Site) -> TokenReducer:
        return self.parts[part_of(site)]


def part_of(site: Site) -> int:
    """Return which of the two acts at a site of a combination, 0 or 1."""
    return _part_site(site).part


def _part_site(site: Site) -> PartSite:
    assert isinstance(site, PartSite)  # a combination makes no others
    return site


def _plain(view: View) -> View:
    return replace(view, site=_part_site(view.site).plain)


def _order(site: Site) -> tuple[int, int]:
    """Return a number for a kind of site, and a layer or a block, in the order in which the engine reaches them."""
    if site.where in BEFORE_DECODER:
        return BEFORE_DECODER.index(site.where), site.layer
    return len(BEFORE_DECODER), 2 * site.layer + (site.where == "block")


def _named(site: Site) -> str:
    return f"{site.where} {site.layer}" if site.where in ("tower", "layer") else site.where


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
    def draws(self) -> bool:
        """Whether one of both does."""
        return self.reducer.draws or self.compressor.draws

    @property
    def takes_separators(self) -> bool:
        """Whether both methods take them."""
        return all(part.takes_separators for part in self.parts)

    @property
    def parts(self) -> tuple[Method, ...]:
        """Return both, in the order in which they act."""
        return (*self.reducer.parts, self.compressor)

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
