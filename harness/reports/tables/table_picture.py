"""A published figure drawn from results: points that a paper shows but does not print."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from statistics import fmean
from textwrap import fill

from matplotlib.figure import Figure

from espalier.harness.reports.curves import figures
from espalier.harness.reports.curves.figures import COLOURS, MARKERS
from espalier.harness.reports.tables.cell_verdicts import FilledCell
from espalier.harness.reports.tables.published_tables import FigurePanel
from espalier.harness.reports.tables.rebuilt_table import RebuiltTable
from espalier.harness.store.row_text import MEANS

#: Letters of a line of the title, of the notes below, and of a panel's title.
TITLE, NOTES, HEADING = 66, 100, 44

#: Mean over benchmarks and number of benchmarks, by line and position on the axis.
Points = Mapping[str, Mapping[str, tuple[float, int]]]


def points(table: RebuiltTable, panel: FigurePanel) -> Points:
    """Return the points of a panel by line and position: means over the benchmarks that all methods of a position have.

    With a reference, scores are percentages of the reference's score on the same benchmark.
    """
    selected = [
        (filled.cell, filled.value)
        for filled in table.filled
        if filled.value is not None and _is_of(filled, panel)
    ]
    references = {
        (cell.model, cell.benchmark, cell.split, cell.metric): value
        for cell, value in selected
        if cell.method == panel.reference
    }
    values_by_position: dict[str, dict[str, dict[tuple[str, ...], float]]] = {}
    for cell, value in selected:
        name, position = getattr(cell, panel.line), getattr(cell, panel.x)
        key = (cell.benchmark, cell.split, cell.metric)
        base = references.get((cell.model, *key)) if panel.reference else 100.0
        if cell.method != panel.reference and base and name in (panel.lines or (name,)):
            values = values_by_position.setdefault(position, {}).setdefault(name, {})
            values[key] = 100 * value / base if panel.reference else value
    lines: dict[str, dict[str, tuple[float, int]]] = defaultdict(dict)
    for position, methods in values_by_position.items():
        shared = set.intersection(*map(set, methods.values()))
        for method, values in methods.items():
            if shared:
                lines[method][position] = fmean(values[key] for key in shared), len(shared)
    return lines


def draw(table: RebuiltTable) -> Figure:
    """Return the figure, panels next to each other."""
    panels = table.entry.panels
    names = dict.fromkeys(
        getattr(filled.cell, panel.line) for panel in panels for filled in table.filled
    )
    looks = dict(zip(names, zip(cycle(COLOURS), cycle(MARKERS), strict=False), strict=False))
    counts = sorted({filled.row.samples for filled in table.filled if filled.row is not None})
    notes = [
        *([f"{', '.join(f'{n:,}' for n in counts)} samples a benchmark."] if counts else []),
        "The paper prints no numbers of this figure.",
        *([f"Measured on {table.model} in place of the printed models."] if table.model else []),
        *([f"Of some rows, {MEANS}."] if any(filled.unread for filled in table.filled) else []),
    ]
    plots = [_plot(table, panel, looks) for panel in panels]
    return figures.draw(plots, fill(table.title, TITLE), fill(" ".join(notes), NOTES), columns=1)


def _plot(
    table: RebuiltTable, panel: FigurePanel, looks: Mapping[str, tuple[str, str]]
) -> figures.Plot:
    """Return the plot of a panel: lines along budgets, or a row for each position."""
    # In the order of the paper's file, without those of the reference alone.
    positions = dict.fromkeys(
        getattr(filled.cell, panel.x)
        for filled in table.filled
        if filled.cell.method != panel.reference and _is_of(filled, panel)
    )
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


def _is_of(filled: FilledCell, panel: FigurePanel) -> bool:
    return all(getattr(filled.cell, key) == value for key, value in panel.where.items())
