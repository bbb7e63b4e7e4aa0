"""Tables and figures of speculative decoders.

`python -m espalier.harness.reports.curves.decoder_report --store results --write lab/measured/speculative`
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from espalier.harness.reports.curves import decoder_figures as figures
from espalier.harness.reports.curves import decoder_results as results
from espalier.harness.reports.curves.curve_table import Columns, cell_table, row_text
from espalier.harness.reports.curves.report_page import Page, Part, Report, texts
from espalier.harness.reports.curves.terminal_tables import FIGURES
from espalier.harness.specs.comparable import amount

INTRO, DECODERS, SPEEDS, RATIOS, CHOICES, WORDS = texts("decoders", guided=results.GUIDED)

#: Columns of a table of decoders.
COLUMNS: Columns = {
    "method": lambda cell: cell.curve,
    "ratio": row_text(amount),
    **{head: row_text(text) for head, text in FIGURES.items()},
}

#: Columns of the table of guidances; times are in the other tables.
ACCEPTED: Columns = {
    "guidance": lambda cell: cell.guidance,
    "L": lambda cell: "its own" if cell.L is None else str(cell.L),
    "ratio": COLUMNS["ratio"],
    "accepted": lambda cell: results.accepted_text(cell.result),
    "mean run": lambda cell: "-" if cell.accepted_run is None else f"{cell.accepted_run:.2f}",
}


def read_page(store: Path, model: str | None, where: Sequence[str]) -> Page:
    """Return the page of a store's decoders; Raises as `read_decoders`."""
    frame = results.read_decoders(store, model, where)
    compared, ratios = results.decoders(frame), results.ratios(frame)
    guidances, timed = results.guidances(frame), results.timed(compared)
    guided = {"guidance": figures.draw_guidance}
    parts = [
        Part(compared, DECODERS),
        Part(timed, SPEEDS, (), {"decoders": figures.draw_decoders}, "decoders"),
        Part(compared, tables=_tables(compared)),
        Part(ratios, RATIOS, _table(ratios), {"ratio": figures.draw_ratio}, "ratio"),
        Part(guidances, CHOICES, _table(guidances, ACCEPTED, " " + WORDS), guided, "guidance"),
    ]
    shown = pd.concat([*compared.values(), ratios, guidances])
    return Page(INTRO, parts, results.omissions(store, frame, shown))


def _tables(compared: Mapping[str, pd.DataFrame]) -> Iterable[str]:
    for name, cells in compared.items():
        yield from (f"### {name}\n", *_table(cells))


def _table(cells: pd.DataFrame, columns: Columns = COLUMNS, words: str = "\n") -> Iterable[str]:
    yield f"{figures.setting_line(cells)}.{words}"
    yield cell_table(cells, columns)


PRESETS = {
    "decoders": "+experiment=speculative",
    "ratio": "+experiment=speculative_ratio",
    "guidance": "+experiment=speculative_guidance",
}
REPORT = Report("decoder_report", __doc__, read_page, PRESETS)
main = REPORT.main

if __name__ == "__main__":
    sys.exit(main())
