"""Which part of the engine carries out which kind of site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from espalier.harness.engine.prefill import Prefill
from espalier.harness.engine.sites.block import BlockSites
from espalier.harness.engine.sites.layer import LayerSites
from espalier.harness.engine.sites.prefix import PrefixSites
from espalier.harness.engine.sites.site import Sites
from espalier.harness.engine.sites.tower import TowerSites
from espalier.harness.engine.sites.vision import VisionSites
from espalier.methods.base import MethodError, Site, TokenReducer

#: The kinds that shorten a prompt. What a method attends to while it answers is no site of these (`decode.py`).
KINDS: Mapping[str, type[Sites]] = {
    "tower": TowerSites,
    "vision": VisionSites,
    "prefix": PrefixSites,
    "layer": LayerSites,
    "block": BlockSites,
}


def check_site_kinds(method: TokenReducer, sites: Sequence[Site]) -> None:
    """Refuse sites that nothing carries out.

    Raises:
        MethodError: names the first one.
    """
    for site in sites:
        if site.where not in KINDS:
            raise MethodError(
                f"{type(method).__name__} acts at a {site.where!r} site, which nothing carries out; "
                f"valid: {', '.join(KINDS)}"
            )


def make_sites(prefill: Prefill) -> list[Sites]:
    """Return what carries out the sites of a pass, neighbours of one kind together, in their order."""
    numbered = enumerate(prefill.setup.sites)
    return [
        KINDS[where](prefill, list(sites))
        for where, sites in groupby(numbered, key=lambda pair: pair[1].where)
    ]


def reads_features(sites: Sequence[Site]) -> bool:
    """Return whether any site reads what goes into the projector."""
    return any(KINDS[site.where].reads_features for site in sites)


def tower_sites(sites: Sequence[Site]) -> list[Site]:
    """Return the sites inside the vision tower."""
    return [site for site in sites if KINDS[site.where].in_tower]
