"""Tables and figures of speculative decoders.

`python -m espalier.harness.reports.curves.decoder_report --store results --write lab/measured/speculative`
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from espalier.harness.reports.curves import decoder_figures as figures
from espalier.harness.reports.curves import decoder_results as results
from espalier.harness.reports.curves.curve_table import Columns, cell_table
from espalier.harness.reports.curves.report_page import Page, Report
from espalier.harness.reports.curves.terminal_tables import FIGURES
from espalier.harness.specs.comparable import amount

PRESETS = {
    "decoders": "+experiment=speculative",
    "ratio": "+experiment=speculative_ratio",
    "guidance": "+experiment=speculative_guidance",
}

#: Columns of a table of decoders.
COLUMNS: Columns = {
    "method": lambda cell: cell.curve,
    "ratio": lambda cell: amount(cell.result.row),
    **{
        head: lambda cell, text=text: text(cell.result.row)  # type: ignore[misc]
        for head, text in FIGURES.items()
    },
}

#: Columns of the table of guidances; times are in the other tables.
ACCEPTED: Columns = {
    "guidance": lambda cell: cell.guidance,
    "L": lambda cell: "its own" if cell.L is None else str(cell.L),
    "ratio": COLUMNS["ratio"],
    "accepted": lambda cell: (
        share.percent if (share := results.accepted_share(cell.result)) else "-"
    ),
    "mean run": lambda cell: "-" if cell.accepted_run is None else f"{cell.accepted_run:.2f}",
}


def read_page(store: Path, model: str | None, where: Sequence[str]) -> Page:
    """Return the page of a store's decoders; Raises as `read_decoders`."""
    frame = results.read_decoders(store, model, where)
    compared, ratios = results.decoders(frame), results.ratios(frame)
    guidances, timed = results.guidances(frame), results.timed(compared)
    shown = pd.concat([*compared.values(), ratios, guidances])
    # A piece of the page and its figure are left out without results.
    pieces = dict(zip(PRESETS, (timed, ratios, guidances), strict=True))
    draw = (figures.draw_decoders, figures.draw_ratio, figures.draw_guidance)
    drawn = {
        name: drawing(cells)  # type: ignore[operator]
        for drawing, (name, cells) in zip(draw, pieces.items(), strict=True)
        if len(cells)
    }

    def table(cells: pd.DataFrame, columns: Columns = COLUMNS) -> Any:
        return (figures.setting_line(cells), cell_table(cells, columns)) if len(cells) else ()

    values = {
        "guided": results.GUIDED,
        "compared": [(name, *table(cells)) for name, cells in compared.items()],
        "ratios": table(ratios),
        "guidances": table(guidances, ACCEPTED),
    }
    return Page(values, drawn, pieces, results.omissions(store, frame, shown))


REPORT = Report("decoder_report", "decoders.md", __doc__, read_page, PRESETS)
main = REPORT.main

if __name__ == "__main__":
    sys.exit(main())
