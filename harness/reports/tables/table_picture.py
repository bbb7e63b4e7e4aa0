"""A published figure drawn from results: points that a paper shows but does not print."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from statistics import fmean
from textwrap import fill

import pandas as pd
from matplotlib.figure import Figure

from espalier.harness.reports.curves import figures
from espalier.harness.reports.curves.figures import COLOURS, MARKERS
from espalier.harness.reports.tables.published_tables import FigurePanel
from espalier.harness.reports.tables.rebuilt_table import RebuiltTable
from espalier.harness.store.row_text import MEANS

#: Letters of a line of the title, of the notes below, and of a panel's title.
TITLE, NOTES, HEADING = 66, 100, 44

#: Columns that name a score of a model.
SCORED = ["benchmark", "split", "metric"]

#: Mean over benchmarks and number of benchmarks, by line and position on the axis.
Points = Mapping[str, Mapping[str, tuple[float, int]]]


def points(table: RebuiltTable, panel: FigurePanel) -> Points:
    """Return the points of a panel by line and position: means over the benchmarks that all methods of a position have.

    With a reference, scores are percentages of the reference's score on the same benchmark.
    """
    cells = _cells_of(table, panel)
    cells = cells[cells["measured"].notna()]
    if panel.reference:
        of_reference = cells["method"] == panel.reference
        keys = ["model", *SCORED]
        references = cells[of_reference].drop_duplicates(keys, keep="last").set_index(keys)
        cells = cells[~of_reference].join(references["measured"].rename("base"), on=keys)
        cells = cells[cells["base"].fillna(0) != 0]
        cells["measured"] = 100 * cells["measured"] / cells["base"]
    if panel.lines:
        cells = cells[cells[panel.line].isin(panel.lines)]
    lines: dict[str, dict[str, tuple[float, int]]] = defaultdict(dict)
    for position, part in cells.groupby(panel.x, sort=False):
        scores = part.pivot_table("measured", SCORED, panel.line, "last", sort=False).dropna()
        for name in scores if len(scores) else ():
            lines[name][position] = fmean(scores[name]), len(scores)
    return lines


def draw(table: RebuiltTable) -> Figure:
    """Return the figure, panels next to each other."""
    panels = table.entry.panels
    names = dict.fromkeys(name for panel in panels for name in table.frame[panel.line])
    looks = dict(zip(names, zip(cycle(COLOURS), cycle(MARKERS), strict=False), strict=False))
    counts = sorted({*table.frame["samples"].dropna()})
    notes = [
        *([f"{', '.join(f'{n:,}' for n in counts)} samples a benchmark."] if counts else []),
        "The paper prints no numbers of this figure.",
        *([f"Measured on {table.model} in place of the printed models."] if table.model else []),
        *([f"Of some rows, {MEANS}."] if any(table.frame["unread"]) else []),
    ]
    plots = [_plot(table, panel, looks) for panel in panels]
    return figures.draw(plots, fill(table.title, TITLE), fill(" ".join(notes), NOTES), columns=1)


def _plot(
    table: RebuiltTable, panel: FigurePanel, looks: Mapping[str, tuple[str, str]]
) -> figures.Plot:
    """Return the plot of a panel: lines along budgets, or a row for each position."""
    # In the order of the paper's file, without those of the reference alone.
    cells = _cells_of(table, panel)
    positions = cells[panel.x][cells["method"] != panel.reference].unique()
    places = {position: float(place) for place, position in enumerate(positions)}
    lines, is_line = points(table, panel), panel.x == "budget"
    series = []
    for name, values in lines.items():
        colour, shape = looks[name]
        spots = [figures.Spot(places[key], value) for key, (value, _) in values.items()]
        look = {"color": colour, "marker": shape, "linestyle": "-" if is_line else ""}
        spots.sort(key=lambda spot: spot.at)
        series.append(figures.Series(name, spots, look, key=True))
    return figures.Plot(
        "curve" if is_line else "dots",
        fill(panel.title, HEADING),
        series,
        note="" if series else "nothing measured yet",
        values=panel.y,
        ticks={at: key for key, at in places.items()},
        from_zero=not is_line,
    )


def write(table: RebuiltTable, folder: Path) -> list[Path]:
    """Draw a figure as SVG and PNG into a folder; return the files."""
    return figures.save(draw(table), folder / table.name, ("svg", "png"))


def _cells_of(table: RebuiltTable, panel: FigurePanel) -> pd.DataFrame:
    keys, values = [*panel.where], [*panel.where.values()]
    return table.frame[(table.frame[keys] == values).all(axis=1)]
