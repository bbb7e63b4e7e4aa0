"""A published figure drawn from rows: what a paper shows by points that it does not print."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from textwrap import fill

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from espalier.harness.reports.curves.plot_style import COLOURS, INK, MARKERS, STYLE
from espalier.harness.reports.tables import table_text as wording
from espalier.harness.reports.tables.cell_verdicts import Filled
from espalier.harness.reports.tables.panels import Panel
from espalier.harness.reports.tables.rebuilt_table import Table
from espalier.harness.store.unparsed_mark import MEANS

#: Inches of a panel, and of the lines around it.
PANEL, AROUND = (4.4, 3.2), 1.1

#: By line and place on the axis the mean over benchmarks, and how many these are.
Points = Mapping[str, Mapping[str, tuple[float, int]]]


def points(table: Table, panel: Panel) -> Points:
    """Return what a panel shows, by line and place: means over the benchmarks that all methods of a place have.

    With a reference, scores are taken over the reference's of the same benchmark, in percent.
    """
    shown = [
        one
        for one in table.filled
        if one.value is not None
        and all(getattr(one.cell, key) == value for key, value in panel.where.items())
    ]
    whole = {_where(one): one.value for one in shown if one.cell.method == panel.reference}
    found: dict[str, dict[str, dict[tuple[str, ...], float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for one in shown:
        name = str(getattr(one.cell, panel.line))
        if one.cell.method == panel.reference or one.value is None:
            continue
        if panel.lines and name not in panel.lines:
            continue
        base = whole.get(_where(one)) if panel.reference else None
        if panel.reference and not base:
            continue
        value = one.value if base is None else 100 * one.value / base
        place = str(getattr(one.cell, panel.x))
        found[place][name][_benchmark(one)] = value
    lines: dict[str, dict[str, tuple[float, int]]] = defaultdict(dict)
    for place, methods in found.items():
        shared = set.intersection(*(set(values) for values in methods.values()))
        for method, values in methods.items():
            if shared:
                lines[method][place] = fmean(values[one] for one in shared), len(shared)
    return lines


def draw(table: Table) -> Figure:
    """Return the figure, a panel beside the other; drawing and saving belong inside `rc_context(STYLE)`."""
    panels = table.entry.panels
    size = (PANEL[0] * len(panels), PANEL[1] + AROUND)
    figure = Figure(figsize=size, layout="constrained")
    names = list(
        dict.fromkeys(
            str(getattr(one.cell, panel.line)) for panel in panels for one in table.filled
        )
    )
    looks = {
        name: (COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)])
        for place, name in enumerate(names)
    }
    for axes, panel in zip(
        figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True
    ):
        _draw(axes, table, panel, looks)
    title, about = (
        fill(wording.title(table), int(9 * size[0])),
        fill(_about(table), int(14 * size[0])),
    )
    figure.supxlabel(about, x=0.01, ha="left", fontsize=8, color="#555555")
    shown = {
        name: handle
        for axes in figure.axes
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    # The legend bears the title, for the layout keeps no room between the two.
    figure.legend(
        [*shown.values()],
        [*shown],
        loc="outside upper left",
        ncols=2 * len(panels),
        title=title,
        title_fontproperties={"size": 11, "weight": "bold"},
        alignment="left",
        frameon=False,
        fontsize=8,
    )
    return figure


def write(table: Table, folder: Path) -> list[Path]:
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


def _draw(axes: Axes, table: Table, panel: Panel, looks: Mapping[str, tuple[str, str]]) -> None:
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
    wide = 0.8 / len(lines)
    for number, (name, values) in enumerate(lines.items()):
        colour, marker = looks[name]
        known = [place for place in places if place in values]
        x, y = [places.index(place) for place in known], [values[place][0] for place in known]
        if panel.x == "budget":
            axes.plot(x, y, color=colour, marker=marker, markersize=5, label=name)
        else:
            moved = [one + wide * (number - (len(lines) - 1) / 2) for one in x]
            axes.bar(moved, y, 0.92 * wide, color=colour, edgecolor=INK, linewidth=0.4, label=name)
    if panel.x == "budget":
        axes.margins(x=0.08, y=0.12)
    else:
        axes.set_ylim(bottom=0)
    steep = max(map(len, places)) * len(places) > 44
    axes.set_xticks(
        range(len(places)), places, rotation=30 if steep else 0, ha="right" if steep else "center"
    )


def _about(table: Table) -> str:
    counts = sorted({one.row.samples for one in table.filled if one.row is not None})
    told = f"{', '.join(f'{count:,}' for count in counts)} samples a benchmark. " if counts else ""
    apart = (
        "" if table.model is None else f" Measured on {table.model} in place of the printed models."
    )
    unread = any(one.unread for one in table.filled)
    marked = f" Of some rows, {MEANS}." if unread else ""
    return f"{told}The paper prints no numbers of this figure.{apart}{marked}"


def _places(table: Table, panel: Panel) -> list[str]:
    """Return the places of the axis in the order of the paper's file, but for those of the reference alone."""
    return list(
        dict.fromkeys(
            str(getattr(one.cell, panel.x))
            for one in table.filled
            if one.cell.method != panel.reference
            and all(getattr(one.cell, key) == value for key, value in panel.where.items())
        )
    )


def _where(one: Filled) -> tuple[str, ...]:
    return one.cell.model, one.cell.benchmark, one.cell.split, one.cell.metric


def _benchmark(one: Filled) -> tuple[str, ...]:
    return one.cell.benchmark, one.cell.split, one.cell.metric


def told(table: Table) -> Sequence[tuple[str, str, str, str]]:
    """Return the points as text: panel, line, place, mean with the number of benchmarks."""
    return [
        (panel.title, name, place, f"{value:.2f} ({count})")
        for panel in table.entry.panels
        for name, values in points(table, panel).items()
        for place, (value, count) in values.items()
    ]
