"""Redraw figures from the tables of their pages, where the results are no longer in a store.

`python -m espalier.harness.reports.curves.redraw lab/measured/sweep/seedling_rec.md` replaces the
.svg of each page, and the .png if there is one: of curves (harness/reports/curves/curve_files.py) and of a sweep
(harness/reports/curves/method_report.py). Tables have a tenth of a percent; figures drawn from results have all
digits, and the command that each page names draws from results.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from espalier.harness.errors import UserError, print_lines
from espalier.harness.reports.curves.curve_files import UNPRUNED, draw_curves
from espalier.harness.reports.curves.curve_points import (
    CONTROLS,
    BaselineGroup,
    Curve,
    CurvePanel,
    CurvePoint,
)
from espalier.harness.reports.curves.figures import save
from espalier.harness.reports.curves.gain_dots import draw_gains
from espalier.harness.specs.commands import PlainParser, command
from espalier.harness.stats import Interval

NUMBER = r"([+-]?\d+\.\d)"
ENDS = re.compile(rf"{NUMBER} \[{NUMBER}, {NUMBER}\]")
KEPT = re.compile(r"(?:(?P<keep>\d+) tokens? \()?(?P<share>[\d.e+-]+) %\)?")
SCORE = re.compile(rf"{NUMBER}(?=,)")
CURVES = re.compile(r"^### (\S+): (\S+), (\d+) samples$", re.M)
SWEEP = re.compile(
    r"^# (\S+): every method.*?^(\S+) in percent on (\d+) samples of .*?; ([\d.]+) with",
    re.M | re.S,
)


def redraw(page: Path) -> Figure:
    """Return the figure of a page.

    Raises:
        UserError: the page has no tables of curves or of a sweep.
    """
    text = page.read_text(encoding="utf-8")
    if SWEEP.search(text):
        return draw_gains(*_sweep(text), {})
    panels = list(_panels(text))
    if not panels:
        raise UserError(
            f"{page} has no tables to draw; valid: lab/measured/figures, lab/measured/sweep"
        )
    return draw_curves(panels)


def _panels(text: str) -> Iterator[CurvePanel]:
    """Yield the panels of a page of curves."""
    starts = [*CURVES.finditer(text)]
    ends = [match.start() for match in starts[1:]] + [len(text)]
    for start, end in zip(starts, ends, strict=False):
        benchmark, metric, samples = start.groups()
        places, rows = _table(text[start.end() : end])
        curves, full = [], None
        for name, cells in rows:
            points = [
                CurvePoint(ratio, _interval(cell), keep=keep)
                for (ratio, keep), cell in zip(places, cells, strict=False)
                if ENDS.search(cell)
            ]
            if name == UNPRUNED:
                full = points[0].score
            else:
                curves.append(Curve(name, name.split()[0] in CONTROLS, None, tuple(points)))
        yield CurvePanel(benchmark, metric, int(samples), full, tuple(curves))


def _sweep(text: str) -> tuple[CurvePanel, list[BaselineGroup]]:
    """Return the panel and the groups of a sweep's page; the first line of each table is random dropping."""
    head = SWEEP.search(text)
    assert head is not None  # checked by the caller
    benchmark, metric, samples, full = head.groups()
    groups = []
    for index, part in enumerate(re.split(r"^## (?:Before|Between).*$", text, flags=re.M)[1:]):
        places, rows = _table(part)
        curves = []
        for number, (name, cells) in enumerate(rows):
            points = [
                replace(
                    _gained(ratio, cell) if number else CurvePoint(ratio, _interval(cell)),
                    keep=keep,
                )
                for (ratio, keep), cell in zip(places, cells, strict=True)
                if cell != "-"
            ]
            floor = rows[0][0] if number else None
            control = name.split("_layer")[0] in CONTROLS
            curves.append(Curve(name, control, floor, tuple(points), index))
        groups.append(BaselineGroup(curves[0], tuple(curves[1:])))
    score = float(full) / 100
    all_curves = tuple(curve for group in groups for curve in (group.floor, *group.curves))
    panel = CurvePanel(benchmark, metric, int(samples), Interval(score, score, score), all_curves)
    return panel, groups


def _table(text: str) -> tuple[list[tuple[float, int | None]], list[tuple[str, list[str]]]]:
    """Return ratios with counts of tokens, and rows, of a text's first table, without columns that are no shares."""
    lines = re.search(r"(?:^\|.*\n?)+", text, re.M)
    if lines is None:
        raise UserError("a page has a heading without a table; valid: a whole page")
    cells_by_line = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in lines[0].splitlines()
    ]
    headings = [match for match in map(KEPT.fullmatch, cells_by_line[0]) if match]
    places = [
        (round(1 - float(match["share"]) / 100, 6), int(match["keep"]) if match["keep"] else None)
        for match in headings
    ]
    return places, [(name, cells[: len(places)]) for name, *cells in cells_by_line[2:]]


def _interval(cell: str) -> Interval:
    match = ENDS.search(cell)
    assert match is not None  # pages are written by this package
    return Interval(*(float(end) / 100 for end in match.groups()))


def _gained(ratio: float, cell: str) -> CurvePoint:
    """Return a point with the interval of its gain; a sweep's table has no interval of the score."""
    match = SCORE.match(cell)
    assert match is not None  # pages are written by this package
    score = float(match[1]) / 100
    return CurvePoint(ratio, Interval(score, score, score), gain=_interval(cell))


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Redraw the figures of pages; exit code 2 and one line if that fails."""
    parser = PlainParser(
        prog="python -m espalier.harness.reports.curves.redraw",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pages", type=Path, nargs="+", metavar="PAGE", help="a page with its table")
    options = parser.parse_args(argv)
    for page in options.pages:
        kinds = [
            kind for kind in ("svg", "png") if kind == "svg" or page.with_suffix(".png").exists()
        ]
        print_lines(save(redraw(page), page.with_suffix(""), kinds)[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
