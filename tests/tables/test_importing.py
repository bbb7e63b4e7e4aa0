"""Published tables are taken over whole."""

from __future__ import annotations

import csv
import hashlib
import math

from espalier.harness.reports.tables.published_tables import (
    FOLDER,
    UNITS,
    papers,
    place,
    read_cells,
    read_paper,
)

TABLES = {
    slug: [number for number, entry in read_paper(slug).tables.items() if not entry.grid]
    for slug in papers()
}


def test_all_tables_of_the_five_papers_are_there() -> None:
    assert {slug: len(tables) for slug, tables in TABLES.items()} == {
        **{"aircache": 10, "d2pruner": 4, "d3tom": 6},
        **{"parallelvlm": 7, "rtprune": 11},
    }
    cells = [read_cells(read_paper(slug), n) for slug, tables in TABLES.items() for n in tables]
    assert sum(map(len, cells)) == 4043


def test_provenance_is_that_of_the_files() -> None:
    with (FOLDER / "provenance.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["file"] for line in lines} == {path.name for path in FOLDER.glob("*_table*.csv")}
    for line in lines:
        content = (FOLDER / line["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == line["sha256"], line["file"]


def test_every_cell_has_names_that_its_paper_explains() -> None:
    for slug in papers():
        paper = read_paper(slug)
        for number, entry in paper.tables.items():
            cells = read_cells(paper, number)
            assert len({cell.key for cell in cells}) == len(cells) == entry.cells
            for cell in cells:
                assert (cell.paper, cell.table) == (paper.paper, number)
                assert cell.model in paper.models
                assert cell.method in {*paper.methods, *entry.methods}
                assert cell.budget in paper.budgets
                assert {cell.benchmark, place(cell)} & paper.benchmarks.keys()
                assert cell.metric in paper.metrics
                assert cell.unit in UNITS
                assert not cell.value or math.isfinite(cell.number)
