"""Every link between pages leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from espalier.harness.paths import ROOT

TEMPLATES = ROOT / "harness" / "reports" / "templates"
PAGES = sorted(
    page
    for page in [
        *ROOT.glob("*.md"),
        *(page for top in ("docs", "harness", "lab") for page in (ROOT / top).rglob("*.md")),
    ]
    if page.parent != TEMPLATES
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_exist(page: Path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target or target.startswith("#"):
            continue
        if not (page.parent / target.split("#")[0]).exists():
            broken.append(target)
    assert not broken


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as a code host makes them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_exist(page: Path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        other = page if not path else page.parent / path
        if anchor and "://" not in target and other.suffix == ".md" and other.exists():
            broken += [target] if anchor not in anchors(other) else []
    assert not broken


def test_there_are_pages():
    assert len(PAGES) >= 3
