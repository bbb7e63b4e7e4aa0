"""`make site`: the pages as a site with search, and the Python interface from its docstrings.

The pages are written for a code host, so that they link to files all over the repository: those are copied to a folder
with README as its first page, and MkDocs makes the site from there without the network.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

import espalier
from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT
from espalier.harness.runs.interface import choice_frames
from espalier.harness.specs.commands import command

CONFIG = ROOT / "mkdocs.yml"
#: Pages that nothing has to link to.
FIRST = ("README.md", "docs/README.md", "CONTRIBUTING.md", "CHANGELOG.md")
#: The page of the Python interface, written here.
API = "docs/api.md"
#: Titles of the parts of the site, and the pages in each.
SECTIONS = {
    "Questions": r"docs/[^/]+$",
    "Recipes": r"docs/recipes/|CONTRIBUTING",
    "Log": r"docs/log/|CHANGELOG",
    "Measured": r"lab/",
    "Files": r"(?!docs/|lab/|README|CONTRIBUTING|CHANGELOG)",
}

LINK = re.compile(r"""\]\(([^)\s#]+)[^)]*\)|(?:src|href)="([^"#]+)""")


def linked_files(page: Path) -> Iterator[Path]:
    """Yield the files of the repository that a page links to; of a folder, the README in it."""
    for match in LINK.finditer(page.read_text(encoding="utf-8")):
        target = unquote(match[1] or match[2])
        path = (page.parent / target).resolve()
        if "://" in target or not path.is_relative_to(ROOT):
            continue
        path = path / "README.md" if path.is_dir() else path
        if path.is_file():
            yield path


def copy_pages(folder: Path) -> None:
    """Copy the pages, all that they link to, and the page of the Python interface."""
    waiting, copied = [ROOT / name for name in FIRST], set[Path]()
    while waiting:
        path = waiting.pop()
        if path in copied:
            continue
        copied.add(path)
        place = folder / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
        if path.suffix == ".md":
            waiting += linked_files(path)
    (folder / API).write_text(api_page(), encoding="utf-8")


def api_page() -> str:
    """Return the page that MkDocs fills with the docstrings of `espalier`."""
    homes = {**espalier._HOMES, "methods": choice_frames.__name__}
    places = (f"{homes[name]}.{name}" for name in espalier.__all__ if name != "results")
    return "# Python interface\n\n" + "\n".join(f"::: {place}\n" for place in places)


def navigation(folder: Path) -> list[dict[str, Any]]:
    """Return every page below a title of its folder, so that none is more than two clicks away."""
    pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.md"))
    sections = {
        title: [page for page in pages if re.match(pattern, page)]
        for title, pattern in SECTIONS.items()
    }
    return [{"Espalier": "README.md"}, *({title: list(part)} for title, part in sections.items())]


def build_site(target: Path) -> None:
    """Write the site to a folder.

    Raises:
        UserError: a link of a page leads nowhere, or MkDocs reports something else.
    """
    with TemporaryDirectory() as folder:
        copy_pages(Path(folder))
        settings: dict[str, Any] = {
            "docs_dir": folder,
            "site_dir": str(target),
            "nav": navigation(Path(folder)),
        }
        config = load_config(str(CONFIG), strict=True, **settings)
        try:
            build(config)
        except Abort as error:
            raise UserError("the site has faults, which the lines above name") from error


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Build the site and print its place."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build/site", help="folder of the site")
    target = parser.parse_args(argv).out.resolve()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    build_site(target)
    print(os.path.relpath(target / "index.html"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
