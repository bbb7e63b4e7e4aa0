"""The output of a command: omitted cells, figures, rows as JSON for programs, advice for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from espalier.harness.errors import plain
from espalier.harness.paths import short_path
from espalier.harness.runs import streams
from espalier.harness.runs.status_line import StatusLine
from espalier.harness.specs.run_spec import RunOptions, RunSpec

if TYPE_CHECKING:
    from pathlib import Path

Rows = Sequence[Mapping[str, Any]]


def write_figures(
    spec: RunSpec,
    rows: Rows,
    left_out: Sequence[tuple[RunSpec, str]],
    cells: int,
    waiting: StatusLine,
) -> Iterator[Path]:
    """Write the curves and the report of all rows and yield their paths."""
    keys = {row["run_key"] for row in rows}
    if spec.curves is not None:
        waiting.say("drawing curves")
        # matplotlib and scipy take a second to import, and most runs draw nothing.
        from espalier.harness.reports.curves.curve_files import write_curves

        yield from write_curves(spec.store, spec.curves, run_keys=keys)
    # An interrupted sweep does not replace the report of a complete one.
    if spec.report is not None and len(rows) + len(left_out) == cells:
        waiting.say("writing the report")
        from espalier.harness.reports.curves.method_report import (
            write_report,  # imports matplotlib and scipy
        )

        yield from write_report(spec, keys, left_out)


def reasons(left_out: Sequence[tuple[RunSpec, str]]) -> dict[str, list[str]]:
    """Return the omitted cells by reason."""
    # Imports torch, which a stored row needs not.
    from espalier.harness.kinds.lookup import label_of

    cells: dict[str, list[str]] = {}
    for spec, reason in left_out:
        name = f"{spec.method.title} {label_of(spec)}".strip()
        cell = f"{name} {spec.budget.amount} {spec.benchmark.name}"
        cells.setdefault(reason, []).append(cell)
    return cells


def print_left(word: str, cells: Sequence[tuple[RunSpec, str]], out: TextIO) -> None:
    """Print the cells that have no row, one line for each reason."""
    for reason, names in reasons(cells).items():
        print(plain(f"{word}: {', '.join(names)}: {reason}"), file=out, flush=True)


def prints_json(spec: RunOptions, out: TextIO) -> bool:
    """Return whether rows are printed as JSON; by default, if the output is not a terminal."""
    return not out.isatty() if spec.json == "auto" else spec.json


def print_json(row: Mapping[str, Any], out: TextIO) -> None:
    """Print a row as one line."""
    with streams.output():
        print(json.dumps(row, allow_nan=False), file=out, flush=True)


def print_end(spec: RunOptions, rows: Rows, advice: tuple[str, str] | None, out: TextIO) -> None:
    """Print the last row as JSON, at a terminal where the rows are and a next command."""
    if prints_json(spec, out):
        print_json(rows[-1], out)
    else:
        print_advice(spec, rows, advice, out)


def print_advice(spec: RunOptions, rows: Rows, advice: tuple[str, str] | None, out: TextIO) -> None:
    """Print where the rows are, and a next command with its purpose."""
    keys = {row["run_key"] for row in rows}
    place = spec.store / "runs" / (keys.pop() if len(keys) == 1 else "*") / "row.json"
    with streams.output():
        print(f"\nrow: {plain(short_path(place))}", file=out)
        if advice is not None:
            line, purpose = advice
            print(f"next: {plain(line)}\n      {purpose}", file=out)
        out.flush()
