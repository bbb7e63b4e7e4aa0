"""The figure of all decoders: speed-up over plain decoding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from espalier.harness.reports.curves.decoder_looks import (
    foot,
    head,
    mark,
    page,
    percent,
    tidy,
    title,
)
from espalier.harness.reports.curves.decoder_rows import DecoderResult
from espalier.harness.reports.curves.plot_style import COLOURS, GREYS, INK

#: Sizes in inches: a bar, and the space around the bars of a panel.
ROW, AROUND = 0.27, 0.55

#: Longest name of a bar, in letters.
NAME = 22

#: Colour and legend by whether draft and target run at the same time.
BARS = {
    False: (COLOURS[0], "draft and target take turns"),
    True: (COLOURS[1], "draft and target side by side"),
}


def draw_decoders(benchmarks: Mapping[str, Sequence[DecoderResult]]) -> Figure:
    """Return bars of the decode speed-up, one panel for each benchmark."""
    columns = min(2, len(benchmarks))
    rows = math.ceil(len(benchmarks) / columns)
    bar_count = max(map(len, benchmarks.values()))
    figure = page((ROW * bar_count + AROUND) * rows + 1.15)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    for axes, (name, cells) in zip(grid.flat, benchmarks.items(), strict=False):
        _bars(axes, name, cells, bar_count)
    # After all panels are drawn, because they share the scale.
    grid[0, 0].set_xlim(left=0)
    for axes in list(grid.flat)[len(benchmarks) :]:
        axes.set_axis_off()
    for axes in list(grid.flat)[max(0, len(benchmarks) - columns) : len(benchmarks)]:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("times as fast as plain decoding")
    kinds = {cell.block["overlap"] for cells in benchmarks.values() for cell in cells}
    handles: list[Line2D | Patch] = [
        Patch(color=colour, label=text) for kind, (colour, text) in BARS.items() if kind in kinds
    ]
    handles += [
        mark("D", "promised by acceptance and single forwards", markerfacecolor="white"),
        mark("|", "end to end, prefill included", markersize=9, markeredgewidth=2),
    ]
    head(figure, "How much faster decoders generate", handles)
    cells = [cell for group in benchmarks.values() for cell in group]
    ratios = sorted({cell.ratio for cell in cells if 0 < cell.ratio < 1})
    pruned = [f"where a draft does without some visual tokens: {percent(r)}" for r in ratios]
    foot(figure, cells, *pruned)
    return figure


def _bars(axes: Axes, name: str, cells: Sequence[DecoderResult], bar_count: int) -> None:
    for row, cell in enumerate(cells):
        block = cell.block
        speed = block["speedup_decode"]
        axes.barh(row, speed, height=0.62, color=BARS[block["overlap"]][0], zorder=2)
        axes.text(
            1.02,
            row,
            f"{speed:.2f}",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
        )
        look = {"markeredgecolor": INK, "linestyle": "", "zorder": 4}
        if block["speedup_predicted"] is not None:
            predicted = block["speedup_predicted"]
            axes.plot(predicted, row, "D", markersize=5, markerfacecolor="white", **look)  # type: ignore[arg-type]
        end_to_end = block["speedup_end_to_end"]
        axes.plot(end_to_end, row, "|", markersize=10, markeredgewidth=2, **look)  # type: ignore[arg-type]
    axes.set_yticks(range(len(cells)), [_short(cell) for cell in cells])
    axes.set_ylim(bar_count - 0.4, -0.6)
    axes.axvline(1, color=GREYS[1], linewidth=1.0, linestyle=(0, (4, 3)), zorder=3)
    title(axes, f"{name}, {cells[0].row['n_samples']} answers")
    tidy(axes, "x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _short(cell: DecoderResult) -> str:
    """Return the method's name, shortened to the width of the labels."""
    name = cell.name
    return name if len(name) <= NAME else name[: NAME - 1] + "\u2026"
