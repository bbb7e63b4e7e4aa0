"""The presets of published tables: `+experiment=d2pruner_table1` runs every cell of that table that a run can fill.

A preset is made from results/papers when it is chosen (harness/config/catalogue.py). It holds the runs that
`python -m espalier tables` looks for, in as few grids as hold them; cells that cannot run are left out and listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from espalier.harness.errors import UserError
from espalier.harness.reports.tables.cell_runs import CellRun, run_of_cell, text
from espalier.harness.reports.tables.panels import display_name, name_of
from espalier.harness.reports.tables.published_tables import Paper, papers, read_cells, read_paper

#: Keys of a grid with lists as values.
LISTED = ("method", "ratio", "benchmark")

Grid = dict[str, Any]


def is_table(name: str) -> bool:
    """Return whether a name is made of a paper's and a table's: `d2pruner_table1`, `d2pruner_fig4`."""
    slug, _, number = name.rpartition("_")
    return number.startswith(("table", "fig")) and slug in papers()


def preset(name: str) -> dict[str, Any]:
    """Return the preset of a table, as a file of conf/experiment has it.

    Raises:
        UserError: the paper has no such table, or no run fills a cell of it.
    """
    slug, _, number = name.rpartition("_")
    paper, number = read_paper(slug), number.removeprefix("table")
    paper.table(number)
    joined = grids(runs_of(paper, number))
    if not joined:
        valid = ", ".join(name for name in titles() if name.startswith(f"{slug}_"))
        raise UserError(f"experiment={name!r}: no run fills a cell of it; valid: {valid}")
    # Accuracy is read from the rows, unless a cell is a time.
    engine = {} if any(needs_times(paper, number)) else {"engine": {"paired": 0}}
    lists = [{k: ",".join(v) if k in LISTED else v for k, v in grid.items()} for grid in joined]
    return {"refused": "skip", **engine, "hydra": {"mode": "MULTIRUN"}, "grids": lists}


def titles() -> dict[str, str]:
    """Return the content of each table with a preset, by the preset's name. Cost: reads all of results/papers."""
    return {
        name_of(
            slug, number
        ): f"{paper.paper} (arXiv {paper.arxiv}), {display_name(number)}: {entry.title}"
        for slug in papers()
        for paper in (read_paper(slug),)
        for number, entry in paper.tables.items()
        if runs_of(paper, number)
    }


def runs_of(paper: Paper, number: str) -> list[Mapping[str, Any]]:
    """Return the runs that a table's cells need, each once, in printed order."""
    runs: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for cell in read_cells(paper, number):
        run = run_of_cell(paper, cell)
        if isinstance(run, CellRun):
            runs.setdefault(run.line, run.overrides)
    return list(runs.values())


def grids(runs: Sequence[Mapping[str, Any]]) -> list[Grid]:
    """Return grids that expand to these runs: benchmarks, methods, ratios joined where all else is equal."""
    merged: list[Grid] = [{**run, **{key: (text(run[key]),) for key in LISTED}} for run in runs]
    for key in ("benchmark", "method", "ratio"):
        joined: dict[tuple[Any, ...], Grid] = {}
        for grid in merged:
            remainder = tuple(sorted((k, str(v)) for k, v in grid.items() if k != key))
            if remainder in joined:
                joined[remainder][key] += grid[key]
            else:
                joined[remainder] = dict(grid)
        merged = list(joined.values())
    return merged


def needs_times(paper: Paper, number: str) -> Iterator[bool]:
    """Yield whether a cell's number is a time, a count or a size, by cell."""
    for cell in read_cells(paper, number):
        run = run_of_cell(paper, cell)
        yield isinstance(run, CellRun) and not run.number_path.startswith("metrics.")
