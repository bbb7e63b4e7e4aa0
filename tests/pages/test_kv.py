"""docs/kv.md: its table has every compressor with what the code says, and names tests that there are."""

from __future__ import annotations

import re

import pytest

from espalier.harness.paths import ROOT
from espalier.harness.specs.catalogue import build_method, names_of
from espalier.methods.compressor import CacheCompressor

PAGE = (ROOT / "docs" / "kv.md").read_text()
TESTS = [*(ROOT / "tests" / "methods").glob("test_*.py"), ROOT / "tests/engine/test_eviction.py"]
DEFINED = {
    name: path
    for path in TESTS
    for name in re.findall(r"^(?:def )?(test_\w+)(?:\(| = check_method)", path.read_text(), re.M)
}
ROWS = {
    cells[0].strip("`"): cells
    for line in PAGE.splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split(" | ")]) == 6
}


@pytest.mark.parametrize("name", names_of(CacheCompressor))
def test_a_compressor_has_a_row_that_says_what_the_code_does(name: str) -> None:
    method = build_method(name, {})
    row = ROWS[name]
    assert row[3] == ("apart" if method.by_head else "together")
    assert row[4] == method.allocation.replace("_", " ")


def test_the_tests_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 10
    assert named <= set(DEFINED)


@pytest.mark.parametrize("name", sorted({*ROWS} - {"method", "---"}))
def test_a_named_test_speaks_of_the_method(name: str) -> None:
    for test in re.findall(r"`(test_\w+)`", ROWS[name][5]):
        # With the cases of its parameters, which stand above it.
        parts = DEFINED[test].read_text().split("\n\n\n")
        body = next(part for part in parts if re.search(rf"^(def )?{test}\b", part, re.M)).lower()
        cls = type(build_method(name, {})).__name__.lower()
        words = f"{name}|{cls}" + "|elite" * (name == "aircache")
        assert re.search(words, body), test
