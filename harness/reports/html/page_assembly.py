"""Assemble the page: its content as JSON, style and script in one file.

Figures of decoders, caches and denoised answers are drawn from the given results, or else those of the repository.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Any

from espalier.harness.errors import UserError, first_words
from espalier.harness.paths import ROOT, short_path
from espalier.harness.reports.curves.plot_style import UNDRAWABLE
from espalier.harness.reports.html.page_content import (
    BLOCKS,
    KINDS,
    CodeOf,
    PageResults,
    gather,
    lines,
    panels,
    styles,
    unscored,
)
from espalier.harness.reports.printed_text import render
from espalier.harness.reports.tables.rebuild import rebuild, requested_tables
from espalier.harness.reports.tables.table_formats import fragment
from espalier.harness.store.row_reader import walk_once

#: Largest convenient size of a page in bytes.
LIMIT = 10_000_000

HERE = Path(__file__).parent
SCRIPTS = (
    "state.js",
    "plots.js",
    "tables.js",
    "leaders.js",
    "board.js",
    "curves.js",
    "methods.js",
    "page.js",
)


def collect(
    stores: Sequence[Path], positions: str, code_of: CodeOf | None = None
) -> dict[str, Any]:
    """Return the content of the page.

    Args:
        stores: run stores and folders of tables.
        positions: the position policy of the results.
        code_of: finds the code of rows' methods, to run them with the embedded model and show what they keep
            (`overlays`); None: nothing is run.

    Raises:
        UserError: there are no results, or a table is damaged.
    """
    # The tables read first: they name their blocks, and the page adds its own.
    read = walk_once(BLOCKS)
    tables, table_notes = rebuild(requested_tables("all", []), stores, read=read)
    results = gather(stores, positions, read)
    unscored(results)
    page_panels, means = panels(results)
    drawings: dict[str, Any] = {"pictures": [], "curves": {}}
    if code_of is not None:
        # Imported here: the embedded model needs torch and transformers, which take seconds to import.
        from espalier.harness.reports.html.overlays import overlays

        drawings = overlays(results, code_of)
    page_lines = lines(results.rows)
    content: dict[str, Any] = {
        "stores": [short_path(store.absolute()) for store in stores],
        "positions": positions,
        "kinds": KINDS,
        "rows": page_lines,
        "styles": styles(page_lines),
        "panels": page_panels,
        "averages": means,
        "overlays": drawings,
        "pictures": pictures(results, stores),
        "tables": [
            {
                "name": table.name,
                "paper": table.paper.paper,
                "title": table.title.removeprefix(f"{table.paper.paper}, "),
                "html": fragment(table),
            }
            for table in tables
        ],
    }
    if table_notes:
        results.notes["published tables"] = table_notes
    # Last, because every step before can exclude results.
    return {**content, "left_out": results.left_out, "notes": results.notes}


def assemble(content: dict[str, Any]) -> str:
    """Return the page as one self-contained file."""
    data = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return render(
        "page.html",
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        stores=", ".join(content["stores"]),
        # The data must not close its element.
        data=data.replace("<", "\\u003c"),
        script="\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS),
    )


@dataclass(frozen=True)
class PictureSource:
    """Figures of one kind: title, the row block of its results, report, folder in the repository, and captions.

    The report has a name only, because it needs torch, which takes seconds to import.
    """

    title: str
    block: str
    report: str
    folder: str
    captions: dict[str, str]


PICTURES = (
    PictureSource(
        "Speculative decoding",
        "speculative",
        "decoder_report:REPORT",
        "lab/measured/speculative",
        {
            "decoders": "Speed-up of each decoder over plain decoding of the same answers.",
            "ratio": "By the share of visual tokens that the draft does without.",
            "guidance": "Drafted tokens accepted, by what chooses the draft's visual tokens.",
        },
    ),
    PictureSource(
        "Cache compression",
        "cache",
        "cache_report:REPORT",
        "lab/measured/kv",
        {"curves": "Score by the share of visual cache entries kept."},
    ),
    PictureSource(
        "Denoised answers",
        "diffusion",
        "diffusion_report:REPORT",
        "lab/measured/diffusion",
        {"merging": "Score by denoising steps and share kept, with the FLOPs of an answer."},
    ),
)


def pictures(results: PageResults, stores: Sequence[Path]) -> list[dict[str, Any]]:
    """Return titles, captions and figures; one that the results cannot provide is the repository's, if this is it."""
    entries = []
    for kind in PICTURES:
        drawn = _draw(kind, results, stores)
        for stem, caption in kind.captions.items():
            measured = ROOT / kind.folder / f"{stem}.svg"
            if stem in drawn or measured.is_file():
                encoded = base64.b64encode(drawn.get(stem) or measured.read_bytes()).decode()
                origin = "the rows of this report" if stem in drawn else kind.folder
                entries.append(
                    {
                        "title": kind.title,
                        "caption": f"{caption} Drawn from {origin}.",
                        "source": f"data:image/svg+xml;base64,{encoded}",
                    }
                )
    return entries


def _draw(source: PictureSource, results: PageResults, stores: Sequence[Path]) -> dict[str, bytes]:
    """Return the figures of the first store with results of the kind."""
    if not any(result.row["extra"].get(source.block) for result in results.rows):
        return {}
    report = resolve_name(f"espalier.harness.reports.curves.{source.report}")
    with TemporaryDirectory() as folder:
        for store in stores:
            try:
                files, _ = report.write(store, Path(folder))
                return {path.stem: path.read_bytes() for path in files if path.suffix == ".svg"}
            except UNDRAWABLE as error:
                reason = error if isinstance(error, UserError) else first_words(error)
                results.drop(f"no picture of {source.title.lower()}", f"{store}: {reason}")
    return {}
