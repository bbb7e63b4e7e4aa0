"""Published tables are taken over whole, or refused by file and line."""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path

import pytest

from espalier.harness.errors import UserError
from espalier.harness.reports.tables.published_tables import FOLDER, papers, read_cells, read_paper
from tests.tables.stored import CELLS, write_paper

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


LINES = CELLS.splitlines(keepends=True)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (CELLS.replace("60.0,%", "60.0", 1), "line 5: 9 columns; valid: 10"),
        (CELLS.replace("60.0,%", "60.0,points", 1), "line 5: unit='points' is unknown"),
        (CELLS.replace("60.0,%", "6O.0,%", 1), "line 5: value='6O.0' is not a number"),
        (CELLS.replace("60.0,%", "nan,%", 1), "line 5: value='nan' is not a number"),
        (CELLS.replace("Fast,50%,Rec", "Fats,50%,Rec"), "line 5: method='Fats' is unknown (did"),
        (CELLS.replace("Fast,50%,Rec", "Fast,5%,Rec"), "line 5: budget='5%' is unknown"),
        (CELLS.replace("Fast,50%,Rec", "Fast,50%,Rex"), "line 5: benchmark='Rex' is unknown"),
        (
            CELLS.replace("Toy,1,Small,Fast,50%,Rec", "Toy,2,Small,Fast,50%,Rec"),
            "line 5: table '2'",
        ),
        (CELLS + LINES[0], "line 8: Toy 1: Small, Full, 100%, Rec, accuracy is there twice"),
        ("".join(LINES[:-1]), "5 cells; valid: 6"),
    ],
)
def test_a_damaged_table_is_refused_by_file_and_line(
    cells: str, message: str, tmp_path: Path
) -> None:
    folder = write_paper(tmp_path / "damaged", cells)
    with pytest.raises(UserError) as refusal:
        read_cells(read_paper("toy", folder), "1", folder)
    line = str(refusal.value)
    assert "toy_table1.csv" in line
    assert message in line
    assert "\n" not in line
