"""The classes that implement each kind of site."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from espalier.harness.engine.prefill import Prefill
from espalier.harness.engine.sites import BlockSites, LayerSites, PrefixSites, Sites, VisionSites
from espalier.methods.base import MethodError, Site, TokenReducer


def _tower() -> type[Sites]:
    # Only runs that act in the tower import what runs its blocks.
    from espalier.harness.engine.tower_sites import TowerSites

    return TowerSites


#: The kinds that shorten a prompt. Decode sites are not among them (`decode.py`).
KINDS: Mapping[str, Callable[[], type[Sites]]] = {
    "tower": _tower,
    "vision": lambda: VisionSites,
    "prefix": lambda: PrefixSites,
    "layer": lambda: LayerSites,
    "block": lambda: BlockSites,
}


def check_site_kinds(method: TokenReducer, sites: Sequence[Site]) -> None:
    """Refuse sites without an implementation.

    Raises:
        MethodError: names the first one.
    """
    for site in sites:
        if site.where not in KINDS:
            raise MethodError(
                f"{type(method).__name__} acts at a {site.where!r} site, which is not implemented; "
                f"valid: {', '.join(KINDS)}"
            )


def make_sites(prefill: Prefill) -> list[Sites]:
    """Return the sites of a pass in their order, consecutive ones of one kind together."""
    numbered = enumerate(prefill.setup.sites)
    return [
        KINDS[where]()(prefill, list(sites))
        for where, sites in groupby(numbered, key=lambda pair: pair[1].where)
    ]


def reads_features(sites: Sequence[Site]) -> bool:
    """Return whether any site reads the projector's input."""
    return any(KINDS[site.where]().reads_features for site in sites)


def tower_sites(sites: Sequence[Site]) -> list[Site]:
    """Return the sites inside the vision tower."""
    return [site for site in sites if KINDS[site.where]().in_tower]
