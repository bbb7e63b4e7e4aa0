"""The page on architecture lists the packages in the order that the layer contract holds."""

from __future__ import annotations

import re
import tomllib

from espalier.harness.paths import ROOT


def test_the_page_lists_every_package_in_the_order_of_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(
        contract["layers"] for contract in contracts["contracts"] if contract["type"] == "layers"
    )
    page = (ROOT / "docs/architecture.md").read_text()
    table = page.partition("| package, from the top |")[2].partition("\n\n")[0]
    place = {
        name.rstrip("/"): number
        for number, line in enumerate(table.splitlines())
        for name in re.findall(r"`([\w./]+)`", line.partition(" | ")[0])
    }
    packages = [re.split(r" [:|] ", layer) for layer in layers]
    folders = {
        package for layer in packages for package in layer if (ROOT / "harness" / package).is_dir()
    }
    assert folders <= set(place)
    places = [
        place[package]
        for layer in packages
        for package in sorted(set(layer) & set(place), key=place.__getitem__)
    ]
    assert places == sorted(places)
