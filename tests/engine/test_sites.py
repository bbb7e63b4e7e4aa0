"""Sites that are not implemented are refused instead of mistaken for another kind."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from espalier.harness.cost.budget import Budget, frame_of
from espalier.harness.engine.forward_pass import KINDS
from espalier.harness.engine.session import Session
from espalier.harness.paths import ROOT
from espalier.methods.base import MethodError, Plan, Site, TokenReducer, View
from tests.family_runs import Tiny
from tests.tiny import tiny_spec


@dataclass(frozen=True)
class At(TokenReducer):
    """Acts at given sites."""

    places: tuple[Site, ...]

    def sites(self, depth: int) -> tuple[Site, ...]:
        return self.places

    def plan(self, view: View, keep: int) -> Plan:
        raise AssertionError("nobody asks")


@pytest.mark.parametrize(
    ("site", "layer"),
    [
        (Site("tower", 3), 0),
        (Site("vision"), 0),
        (Site("prefix"), 0),
        (Site("layer", 0), 0),
        (Site("layer", 4), 4),
        (Site("block", 4), 5),
        (Site("cache", 4), None),
        (Site("decode", 4), None),
    ],
)
def test_a_site_knows_what_it_shortens(site: Site, layer: int | None) -> None:
    assert site.shortens == layer
    assert (site.where in KINDS) == (layer is not None)


@pytest.mark.parametrize("where", ["cache", "decode"])
def test_what_is_not_implemented_is_refused_and_shortens_no_prompt(where: str) -> None:
    method = At((Site("prefix"), Site(where, 2)))  # type: ignore[arg-type]
    with pytest.raises(MethodError, match="shortens no input"):
        frame_of(method, tiny_spec("llava").facts, 16, 8)
    with pytest.raises(MethodError, match=f"^At acts at a '{where}' site, which is not"):
        Session(Tiny("llava").adapter, method, Budget("kept", 0.5))


def test_kinds_are_told_apart_in_one_place() -> None:
    rooms = [ROOT / "harness" / "engine", ROOT / "harness" / "cost"]
    asking = [
        file.name
        for room in rooms
        for file in room.rglob("*.py")
        if ".where ==" in file.read_text()
    ]
    assert not asking
