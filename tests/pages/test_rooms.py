"""The page on architecture lists the packages in the order that the layer contract holds."""

from __future__ import annotations

import re
import tomllib

from espalier.harness.paths import ROOT


def test_the_page_lists_every_package_in_the_order_of_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(one["layers"] for one in contracts["contracts"] if one["type"] == "layers")
    page = (ROOT / "docs/architecture.md").read_text()
    table = page.partition("| package, from the top |")[2].partition("\n\n")[0]
    place = {
        name.rstrip("/"): number
        for number, line in enumerate(table.splitlines())
        for name in re.findall(r"`([\w./]+)`", line.partition(" | ")[0])
    }
    rooms = [re.split(r" [:|] ", layer) for layer in layers]
    folders = {room for layer in rooms for room in layer if (ROOT / "harness" / room).is_dir()}
    assert folders <= set(place)
    found = [
        place[room]
        for layer in rooms
        for room in sorted(set(layer) & set(place), key=place.__getitem__)
    ]
    assert found == sorted(found)
