"""The page, put together: what it shows as JSON, its style and its script in one file."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from espalier.harness.paths import ROOT
from espalier.harness.reports.html.overlays import overlays
from espalier.harness.reports.html.page_content import KINDS, lines, panels, styles, unscored
from espalier.harness.reports.html.page_pictures import pictures
from espalier.harness.reports.html.page_rows import Gathered, gather
from espalier.harness.reports.tables.rebuild import asked, rebuild
from espalier.harness.reports.tables.table_page import fragment
from espalier.harness.reports.tables.table_text import title

#: Bytes of a page that is still handy.
LIMIT = 10_000_000

HERE = Path(__file__).parent
SCRIPTS = ("state.js", "plots.js", "board.js", "curves.js", "methods.js", "page.js")


def collect(stores: Sequence[Path], positions: str, drawn: bool = True) -> dict[str, Any]:
    """Return all that the page shows.

    Args:
        stores: run stores and folders of tables.
        positions: the position policy of the rows.
        drawn: whether the embedded model answers, to show what methods keep.

    Raises:
        UserError: there are no rows, or a table is damaged.
    """
    found = gather(stores, positions)
    unscored(found)
    content: dict[str, Any] = {
        "stores": [_named(store) for store in stores],
        "positions": positions,
        "kinds": KINDS,
        "rows": lines(found.rows),
        "styles": styles(found.rows),
        "panels": panels(found),
        "overlays": overlays(found) if drawn else {"pictures": [], "curves": {}},
        "pictures": pictures(found, stores),
        "tables": _tables(found, stores),
    }
    # Last, since everything before may leave something out.
    return {**content, "left_out": found.left_out, "notes": found.notes}


def assemble(content: dict[str, Any]) -> str:
    """Return the page: one file, without a link to another."""
    script = "\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    data = json.dumps(content, separators=(",", ":"), allow_nan=False)
    # Nothing of it may end the element that holds it, or look like a place to fill.
    data = data.replace("<", "\\u003c")
    parts = {
        "STYLE": (HERE / "page.css").read_text(encoding="utf-8"),
        "STORES": html.escape(", ".join(content["stores"])),
        "DATA": data,
        "SCRIPT": script,
    }
    page = (HERE / "page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace(f"<!--{name}-->", text)
    return page


def _tables(found: Gathered, stores: Sequence[Path]) -> list[dict[str, str]]:
    tables, notes = rebuild(asked("all", []), stores)
    if notes:
        found.notes["published tables"] = notes
    return [{"title": title(table), "html": fragment(table)} for table in tables]


def _named(store: Path) -> str:
    return str(store.relative_to(ROOT)) if store.is_relative_to(ROOT) else store.name
