"""A small paper with one table, rows as a store has them, and the runs of the published tables."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from espalier.harness.reports.tables.cell_runs import CellRun, run_of_cell
from espalier.harness.reports.tables.published_tables import (
    COLUMNS,
    PrintedCell,
    papers,
    read_cells,
    read_paper,
)
from espalier.harness.store import Store

PAPER = """\
paper: Toy
title: A Toy Paper
arxiv: "0000.00000"
venue: NOWHERE 2026
transcribed: By hand.
models: {Small: {model: seedling}}
methods: {Full: {method: none}, Fast: {method: fastv}}
budgets: {100%: {ratio: 0}, 50%: {ratio: 0.5}}
benchmarks:
  Rec: {benchmark: seedling_rec}
  Vqa: {benchmark: seedling_vqa}
  Avg: an average
metrics: {accuracy: {}, relative: an average}
tables:
  1:
    title: two benchmarks
    cells: 6
    rebuilt: [measured]
    average: {where: {benchmark: Avg}, rule: ratios, reference: Full}
"""

CELLS = """\
Toy,1,Small,Full,100%,Rec,,accuracy,80.0,%
Toy,1,Small,Full,100%,Vqa,,accuracy,90.0,%
Toy,1,Small,Full,100%,Avg,,relative,100,% of vanilla
Toy,1,Small,Fast,50%,Rec,,accuracy,60.0,%
Toy,1,Small,Fast,50%,Vqa,,accuracy,81.0,%
Toy,1,Small,Fast,50%,Avg,,relative,90.0,% of vanilla
"""


def write_paper(folder: Path, cells: str = CELLS) -> Path:
    """Write the paper's file and its table; return the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "toy.yaml").write_text(PAPER)
    (folder / "toy_table1.csv").write_text(f"{','.join(COLUMNS)}\n{cells}")
    return folder


def commit(store: Path, key: str, value: float, **changed: Any) -> None:
    """Commit a row of the unpruned model on seedling_rec, or what differs from that."""
    top = {name: changed.pop(name) for name in list(changed) if "__" not in name}
    benchmark = top.get("benchmark", "seedling_rec")
    metric = "acc_at_50" if benchmark == "seedling_rec" else "accuracy"
    method = top.get("method", "none")
    params = {"K": 2, "queries": "last"} if method == "fastv" else {}
    row = {
        "schema": 1,
        "run_key": key,
        "model": "seedling",
        "method": method,
        "variant": "official" if method == "fastv" else "paper",
        "benchmark": benchmark,
        "ratio": 0,
        "budget_rule": "kept",
        "seed": 0,
        "n_samples": 500,
        "metrics": {metric: {"value": value, "stderr": 0.01}},
        "settings": {
            "model": {"weights": "trained"},
            "method": {"params": params},
            "draft": None,
            "benchmark": {"limit": None},
            "engine": {"positions": changed.get("engine__positions"), "rescore": False},
        },
        "extra": {"environment": {"commit": changed.get("environment__commit", "abc")}},
        **top,
    }
    Store(store).run(key).commit(row)


@cache
def runs(slug: str) -> tuple[tuple[PrintedCell, CellRun], ...]:
    """Return the cells of a paper that runs fill, with these."""
    paper = read_paper(slug)
    cells = (cell for number in paper.tables for cell in read_cells(paper, number))
    filled = ((cell, run_of_cell(paper, cell)) for cell in cells)
    return tuple((cell, run) for cell, run in filled if isinstance(run, CellRun))


def all_runs() -> Iterator[tuple[PrintedCell, CellRun]]:
    for slug in papers():
        yield from runs(slug)
