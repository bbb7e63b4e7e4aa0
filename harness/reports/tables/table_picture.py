"""A published figure drawn from results: points that a paper shows but does not print."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from textwrap import fill

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from espalier.harness.reports.curves.plot_style import COLOURS, INK, MARKERS, STYLE
from espalier.harness.reports.tables.cell_verdicts import FilledCell
from espalier.harness.reports.tables.published_tables import FigurePanel
from espalier.harness.reports.tables.rebuilt_table import RebuiltTable
from espalier.harness.reports.tables.table_formats import title
from espalier.harness.store.row_text import MEANS

#: Sizes in inches: a panel, and the text around it.
PANEL, AROUND = (4.4, 3.2), 1.1

#: Mean over benchmarks and number of benchmarks, by line and position on the axis.
Points = Mapping[str, Mapping[str, tuple[float, int]]]


def points(table: RebuiltTable, panel: FigurePanel) -> Points:
    """Return the points of a panel by line and position: means over the benchmarks that all methods of a position have.

    With a reference, scores are percentages of the reference's score on the same benchmark.
    """
    selected = [
        filled
        for filled in table.filled
        if filled.value is not None
        and all(getattr(filled.cell, key) == value for key, value in panel.where.items())
    ]
    references = {
        _reference_key(filled): filled.value
        for filled in selected
        if filled.cell.method == panel.reference
    }
    values_by_position: dict[str, dict[str, dict[tuple[str, ...], float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for filled in selected:
        name = str(getattr(filled.cell, panel.line))
        if filled.cell.method == panel.reference or filled.value is None:
            continue
        if panel.lines and name not in panel.lines:
            continue
        reference = references.get(_reference_key(filled)) if panel.reference else None
        if panel.reference and not reference:
            continue
        value = filled.value if reference is None else 100 * filled.value / reference
        position = str(getattr(filled.cell, panel.x))
        values_by_position[position][name][_benchmark(filled)] = value
    lines: dict[str, dict[str, tuple[float, int]]] = defaultdict(dict)
    for position, methods in values_by_position.items():
        shared = set.intersection(*(set(values) for values in methods.values()))
        for method, values in methods.items():
            if shared:
                lines[method][position] = fmean(values[key] for key in shared), len(shared)
    return lines


def draw(table: RebuiltTable) -> Figure:
    """Return the figure, panels next to each other; draw and save inside `rc_context(STYLE)`."""
    panels = table.entry.panels
    size = (PANEL[0] * len(panels), PANEL[1] + AROUND)
    figure = Figure(figsize=size, layout="constrained")
    names = list(
        dict.fromkeys(
            str(getattr(filled.cell, panel.line)) for panel in panels for filled in table.filled
        )
    )
    looks = {
        name: (COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)])
        for index, name in enumerate(names)
    }
    for axes, panel in zip(
        figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True
    ):
        _draw(axes, table, panel, looks)
    heading, about = (
        fill(title(table), int(9 * size[0])),
        fill(_about(table), int(14 * size[0])),
    )
    figure.supxlabel(about, x=0.01, ha="left", fontsize=8, color="#555555")
    handles_by_name = {
        name: handle
        for axes in figure.axes
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    # The legend carries the title, because the layout leaves no room between the two.
    figure.legend(
        [*handles_by_name.values()],
        [*handles_by_name],
        loc="outside upper left",
        ncols=2 * len(panels),
        title=heading,
        title_fontproperties={"size": 11, "weight": "bold"},
        alignment="left",
        frameon=False,
        fontsize=8,
    )
    return figure


def write(table: RebuiltTable, folder: Path) -> list[Path]:
    """Draw a figure as SVG and PNG into a folder; return the files."""
    with mpl.rc_context(STYLE):
        figure, paths = (
            draw(table),
            [folder / f"{table.name}.{ending}" for ending in ("svg", "png")],
        )
        for path in paths:
            figure.savefig(
                path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None
            )
    return paths


def _draw(
    axes: Axes, table: RebuiltTable, panel: FigurePanel, looks: Mapping[str, tuple[str, str]]
) -> None:
    lines = points(table, panel)
    places = _places(table, panel)
    axes.set_title(fill(panel.title, int(10 * PANEL[0])), loc="left", fontsize=10)
    axes.set_ylabel(panel.y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    if not lines:
        axes.text(
            0.5, 0.5, "nothing measured yet", ha="center", color="#777777", transform=axes.transAxes
        )
        axes.set_xticks([])
        axes.set_yticks([])
        return
    width = 0.8 / len(lines)
    for number, (name, values) in enumerate(lines.items()):
        colour, marker = looks[name]
        measured = [place for place in places if place in values]
        x, y = [places.index(place) for place in measured], [values[place][0] for place in measured]
        if panel.x == "budget":
            axes.plot(x, y, color=colour, marker=marker, markersize=5, label=name)
        else:
            moved = [position + width * (number - (len(lines) - 1) / 2) for position in x]
            axes.bar(moved, y, 0.92 * width, color=colour, edgecolor=INK, linewidth=0.4, label=name)
    if panel.x == "budget":
        axes.margins(x=0.08, y=0.12)
    else:
        axes.set_ylim(bottom=0)
    steep = max(map(len, places)) * len(places) > 44
    axes.set_xticks(
        range(len(places)), places, rotation=30 if steep else 0, ha="right" if steep else "center"
    )


def _about(table: RebuiltTable) -> str:
    counts = sorted({filled.row.samples for filled in table.filled if filled.row is not None})
    sample_text = (
        f"{', '.join(f'{count:,}' for count in counts)} samples a benchmark. " if counts else ""
    )
    model_text = (
        "" if table.model is None else f" Measured on {table.model} in place of the printed models."
    )
    unread = any(filled.unread for filled in table.filled)
    unread_text = f" Of some rows, {MEANS}." if unread else ""
    return f"{sample_text}The paper prints no numbers of this figure.{model_text}{unread_text}"


def _places(table: RebuiltTable, panel: FigurePanel) -> list[str]:
    """Return the positions of the axis in the order of the paper's file, without those of the reference alone."""
    return list(
        dict.fromkeys(
            str(getattr(filled.cell, panel.x))
            for filled in table.filled
            if filled.cell.method != panel.reference
            and all(getattr(filled.cell, key) == value for key, value in panel.where.items())
        )
    )


def _reference_key(filled: FilledCell) -> tuple[str, ...]:
    return filled.cell.model, filled.cell.benchmark, filled.cell.split, filled.cell.metric


def _benchmark(filled: FilledCell) -> tuple[str, ...]:
    return filled.cell.benchmark, filled.cell.split, filled.cell.metric
