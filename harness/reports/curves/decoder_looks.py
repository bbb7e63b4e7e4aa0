"""Shared parts of the decoder figures: size, title, legend, footnote, axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from espalier.harness.reports.curves.decoder_rows import DecoderResult
from espalier.harness.reports.curves.plot_style import INK

#: Width of all figures in inches: a page.
WIDE = 7.0


def page(height: float) -> Figure:
    """Return an empty figure of page width; `height` in inches."""
    return Figure(figsize=(WIDE, height), layout=ConstrainedLayoutEngine(h_pad=0.06, w_pad=0.06))


def head(figure: Figure, title: str, handles: Sequence[Line2D | Patch]) -> None:
    """Write the title and the legend at the top."""
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


def foot(figure: Figure, cells: Sequence[DecoderResult], *notes: str) -> None:
    """Write the setting of the results and the notes at the bottom, one line each."""
    text = "\n".join([setting_line(cells), *filter(None, notes)])
    figure.supxlabel(text, x=0.01, ha="left", fontsize=7.5, color="#666666")


def setting_line(cells: Sequence[DecoderResult]) -> str:
    """Return one line on how the results were made: models, device, threads, type, answers."""
    row = cells[0].row
    drafts = dict.fromkeys(cell.draft for cell in cells if cell.draft)
    environment = row["extra"].get("environment", {})
    threads = environment.get("threads")
    counts = sorted({cell.row["n_samples"] for cell in cells})
    parts = [
        row["model"] + (f" with {', '.join(drafts)} as draft" if drafts else ""),
        environment.get("device_name"),
        threads and f"{threads} thread{'s' if threads > 1 else ''}",
        environment.get("dtype"),
        f"{', '.join(map(str, counts))} answers a row",
    ]
    return "; ".join(part for part in parts if part)


def mark(marker: str, label: str, **look: Any) -> Line2D:
    """Return a legend entry with a marker only."""
    entry = Line2D([], [], marker=marker, linestyle="", label=label, color=INK, markersize=5)
    entry.set(**look)
    return entry


def title(axes: Axes, text: str) -> None:
    """Write a panel's title."""
    axes.set_title(text, loc="left", fontsize=9, fontweight="bold")


def tidy(axes: Axes, grid: Literal["x", "y"]) -> None:
    """Remove the spines, and draw grid lines along one axis."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=3)


def percent(ratio: float) -> str:
    """Return a share in percent."""
    return f"{100 * ratio:.4g} %"
