"""Write the figure and the tables of curves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from matplotlib import rc_context

from espalier.harness.errors import plain_page
from espalier.harness.reports.curves.figures import draw
from espalier.harness.reports.curves.curve_points import CurvePanel, read_panels
from espalier.harness.reports.curves.curve_table import markdown
from espalier.harness.reports.curves.plot_style import STYLE
from espalier.harness.reports.curves.point_frame import frame_of

#: Dots per inch of the PNG.
RESOLUTION = 150
#: Suffixes of the files that are written.
SUFFIXES = ("png", "svg", "md", "tex", "csv")


def write_curves(
    store: Path,
    out: Path,
    benchmarks: Sequence[str] = (),
    model: str | None = None,
    rule: str = "kept",
    run_keys: Collection[str] | None = None,
) -> tuple[Path, ...]:
    """Write the figure and the tables of the finished runs of a store.

    Args:
        store: root of the run store.
        out: path without suffix; its folder is created.
        benchmarks: names, in this order; empty for all that have results.
        model: required if the store has several.
        rule: budget rule of the results.
        run_keys: restrict to these runs.

    Returns:
        The paths, as of `write_panels`.

    Raises:
        UserError: the store lacks the requested results.
    """
    panels = read_panels(store, benchmarks, model, rule, run_keys, swept=True)
    return write_panels(panels, out)


def write_quickstart(
    store: Path, out: Path, run_keys: Collection[str] | None = None
) -> tuple[Path, ...]:
    """Write the curves of all benchmarks of the runs (of all finished runs if `run_keys` is None)."""
    return write_curves(store, out, run_keys=run_keys)


def write_panels(panels: Sequence[CurvePanel], out: Path) -> tuple[Path, ...]:
    """Write the figure (`<out>.png`, `.svg`) and the tables (`.md`, `.tex`, `.csv`), and return the paths."""
    out.parent.mkdir(parents=True, exist_ok=True)
    png, svg, table, latex, points = (out.with_name(f"{out.name}.{kind}") for kind in SUFFIXES)
    with rc_context(STYLE):
        figure = draw(panels)
        figure.savefig(png, dpi=RESOLUTION)
        # No date, and a fixed salt in the style: equal data gives equal bytes.
        figure.savefig(svg, metadata={"Date": None})
    table.write_text(plain_page(markdown(panels)), encoding="utf-8")
    frame = frame_of(panels)
    frame.to_latex(latex, counts=True)
    frame.to_csv(points, index=False, encoding="utf-8")
    return png, svg, table, latex, points
