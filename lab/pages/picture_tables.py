"""The numbers of pictures, read from the committed tables of lab/measured and from the demo rows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from espalier.harness.errors import UserError
from espalier.harness.stats import holm
from lab.pages.picture_grid import Estimate, Mark

NUMBER = r"[+-]?\d+\.\d"
ENDS = re.compile(rf"({NUMBER}) \[({NUMBER}), ({NUMBER})\]")
GAIN = re.compile(r"[+-]\d+\.\d \[")
P_VALUE = re.compile(r"p [<=] ([\d.]+)")
#: Corrected p-values below this show a difference.
LEVEL = 0.05


@dataclass(frozen=True)
class PageTable:
    """A table of a page: its last heading, the last line of text before it, and its cells by row and column."""

    heading: str
    text: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, tuple[str, ...]], ...]


def page_tables(page: Path) -> Iterator[PageTable]:
    """Yield the Markdown tables of a page."""
    heading = text = ""
    block: list[list[str]] = []
    for line in [*page.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            block.append([cell.strip() for cell in line.strip("|").split("|")])
            continue
        if block:
            names, _, *rows = block
            lines = tuple((row[0], tuple(row[1:])) for row in rows)
            yield PageTable(heading, text, tuple(names[1:]), lines)
            block = []
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line:
            text = line


def tables_with(page: Path, words: str) -> list[PageTable]:
    """Return the tables of a page with these words in their heading or in the text before them.

    Raises:
        UserError: there are none.
    """
    tables = [table for table in page_tables(page) if words in f"{table.heading}\n{table.text}"]
    if not tables:
        raise UserError(f"{page}: no table of {words!r}; valid: a page as its command wrote it")
    return tables


def interval_of(cell: str) -> tuple[float, tuple[float, float]] | None:
    """Return the value and the interval of a cell: the last `value [low, high]` in it."""
    matches = ENDS.findall(cell)
    if not matches:
        return None
    value, low, high = map(float, matches[-1])
    return value, (low, high)


def gains(table: PageTable, shares: Sequence[str]) -> dict[tuple[str, str], list[Estimate]]:
    """Return the points above random dropping by method and share, marked where the corrected test finds a difference.

    A cell of newer pages has a star; for older ones Holm's correction is applied to the printed p-values.
    """
    cells = [
        (name, share, cell)
        for name, row in table.lines
        for share, cell in zip(table.columns, row, strict=True)
        if share in shares and GAIN.search(cell)
    ]
    p_values = [match for _, _, cell in cells if (match := P_VALUE.search(cell))]
    corrected = holm([float(match[1]) for match in p_values])
    marked: dict[tuple[str, str], list[Estimate]] = {}
    for number, (name, share, cell) in enumerate(cells):
        parsed = interval_of(cell)
        assert parsed is not None  # as searched above
        value, ends = parsed
        differs = corrected[number] < LEVEL if len(corrected) == len(cells) else "*" in cell
        marked[name, share] = [Estimate(value, ends, mark_of(value, differs))]
    return marked


def scores(
    table: PageTable, shares: Sequence[str], controls: Sequence[str]
) -> dict[tuple[str, str], list[Estimate]]:
    """Return the scores of a table by method and share, without the unpruned model's."""
    return {
        (name, share): [
            Estimate(*parsed, Mark.OPEN if name.split()[0] in controls else Mark.METHOD)
        ]
        for name, row in table.lines
        for share, cell in zip(table.columns, row, strict=True)
        if share in shares and name != "unpruned" and (parsed := interval_of(cell))
    }


def demo_gains(
    points: pd.DataFrame, names: dict[str, str]
) -> dict[tuple[str, str], list[Estimate]]:
    """Return the gains of a benchmark's points over random dropping at the same place, by name and share kept."""
    marked: dict[tuple[str, str], list[Estimate]] = {}
    for curve, name in names.items():
        of_curve = points[(points.curve == curve) & points.gain.notna()].sort_values("ratio")
        for point in of_curve.itertuples():
            ends = (100 * float(point.gain_low), 100 * float(point.gain_high))
            mark = mark_of(float(point.gain), float(point.gain_p_holm) < LEVEL)
            share = f"{100 * (1 - float(point.ratio)):.3g} %"
            marked[name, share] = [Estimate(100 * float(point.gain), ends, mark)]
    return marked


def mark_of(gain: float, differs: bool) -> Mark:
    """Return the mark of a gain."""
    return Mark.OPEN if not differs else Mark.BETTER if gain > 0 else Mark.WORSE
