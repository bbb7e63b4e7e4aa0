"""`make site`: all pages, every link of them, and the Python interface, without the network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import espalier
from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT
from lab.pages import site

LOADED = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]*)"')


@pytest.mark.slow
def test_the_site_has_every_page_and_the_whole_interface(tmp_path: Path) -> None:
    """A link or an anchor that leads nowhere would end it."""
    site.build_site(tmp_path)
    texts = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    assert not [LOADED.findall(text) for text in texts.values() if LOADED.search(text)]
    # The page in docs/space/ is the settings of a Space.
    pages = {path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")}
    pages.remove(Path("docs/space/README.md"))
    # The first page of each part is one click away, and lists the others of its part.
    first_page = (tmp_path / "index.html").read_text()
    for page in pages:
        place = page.with_name("index.md") if page.name == "README.md" else page
        address = place.with_suffix(".html").as_posix()
        assert (tmp_path / address).is_file()
        parts = re.findall(r'href="([^"]+)" class="md-tabs__link"', first_page)
        linked = [re.findall(r'href="([^"#]+)"', texts[tmp_path / part]) for part in parts]
        places = [
            {(tmp_path / part).parent.joinpath(link).resolve() for link in links}
            for part, links in zip(parts, linked, strict=True)
        ]
        assert any(tmp_path / address in part for part in places)
    interface = texts[tmp_path / "docs" / "api.html"]
    for name in set(espalier.__all__) - {"results"}:
        assert f'.{name}" class="doc doc-heading"' in interface


@pytest.mark.slow
def test_a_link_that_leads_nowhere_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_broken_page(folder: Path) -> None:
        (folder / "README.md").write_text("# A page\n\n[lost](nowhere.md)\n")

    monkeypatch.setattr(site, "copy_pages", copy_broken_page)
    with pytest.raises(UserError, match="the site has faults"):
        site.build_site(tmp_path)
