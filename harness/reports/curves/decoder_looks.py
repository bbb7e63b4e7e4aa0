"""What the pictures of decoders share: size, title, legend, footnote, axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from espalier.harness.reports.curves.decoder_rows import Cell
from espalier.harness.reports.curves.plot_style import INK

#: In inches: all pictures are as wide as a page.
WIDE = 7.0


def page(height: float) -> Figure:
    """Return an empty figure as wide as a page, `height` in inches."""
    return Figure(figsize=(WIDE, height), layout=ConstrainedLayoutEngine(h_pad=0.06, w_pad=0.06))


def head(figure: Figure, title: str, handles: Sequence[Line2D | Patch]) -> None:
    """Write the title and the legend above everything."""
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=min(2, len(handles)) if len(handles) == 4 else 3,
        frameon=False,
        fontsize=8.5,
        title=title,
        title_fontproperties={"size": 11, "weight": "bold"},
        alignment="left",
    )


def foot(figure: Figure, cells: Sequence[Cell], *notes: str) -> None:
    """Write below what made the rows, and notes, a line each."""
    text = "\n".join([around(cells), *filter(None, notes)])
    figure.supxlabel(text, x=0.01, ha="left", fontsize=7.5, color="#666666")


def around(cells: Sequence[Cell]) -> str:
    """Return in a line what made these rows: models, device, threads, type, answers."""
    row = cells[0].row
    drafts = dict.fromkeys(cell.draft for cell in cells if cell.draft)
    where = row["extra"].get("environment", {})
    threads = where.get("threads")
    counts = sorted({cell.row["n_samples"] for cell in cells})
    parts = [
        row["model"] + (f" with {', '.join(drafts)} as draft" if drafts else ""),
        where.get("device_name"),
        threads and f"{threads} thread{'s' if threads > 1 else ''}",
        where.get("dtype"),
        f"{', '.join(map(str, counts))} answers a row",
    ]
    return "; ".join(part for part in parts if part)


def mark(marker: str, label: str, **look: Any) -> Line2D:
    """Return an entry of a legend that has no line."""
    entry = Line2D([], [], marker=marker, linestyle="", label=label, color=INK, markersize=5)
    entry.set(**look)
    return entry


def title(axes: Axes, text: str) -> None:
    """Write a panel's title."""
    axes.set_title(text, loc="left", fontsize=9, fontweight="bold")


def tidy(axes: Axes, grid: Literal["x", "y"]) -> None:
    """Take away what is no data, and draw lines across one axis."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=3)


def percent(ratio: float) -> str:
    """Return a share in percent."""
    return f"{100 * ratio:.4g} %"
