"""Which statistic and which run each printed cell asks for, and what a paper's file may say of some cells alone."""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from espalier.harness.reports.tables.cell_runs import CellRun, method_of, run_of_cell
from espalier.harness.reports.tables.cell_verdicts import ResultIndex
from espalier.harness.reports.tables.published_tables import (
    FIRST,
    NUMBER_KEYS,
    PrintedCell,
    papers,
    place,
    read_cells,
    read_paper,
)
from espalier.harness.reports.tables.rebuilt_table import build
from lab.analytic.rtprune_formulas import UNPRUNED_LAYERS
from tests.tables.stored import PAPER, write_paper

#: Sections of overrides that rows record, so that a table can compare them.
SECTIONS = ("model", "method", "benchmark", "engine", "judge")

#: Parts of a paper's file with entries for the names of a cell.
PARTS = ("models", "methods", "budgets", "benchmarks", "metrics")

STATISTICS = Path(__file__).parent / "statistics.csv"


def cells() -> Iterator[tuple[str, PrintedCell]]:
    """Yield every cell of every table and figure, with the name of its paper's file."""
    for slug in papers():
        paper = read_paper(slug)
        for number in paper.tables:
            yield from ((slug, cell) for cell in read_cells(paper, number))


def run_of(slug: str, cell: PrintedCell) -> CellRun | str:
    return run_of_cell(read_paper(slug), cell)


@pytest.mark.slow
def test_every_cell_of_every_table_is_filled_by_the_statistic_of_the_list() -> None:
    """The list was written by hand; its patterns fit whole names, and one line of it fits each cell."""
    with STATISTICS.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    columns = [name for name in lines[0] if name not in ("statistic", "scale")]
    fitting = Counter[int]()
    for slug, cell in cells():
        fitted = [
            index
            for index, line in enumerate(lines)
            if all(re.fullmatch(line[name], getattr(cell, name)) for name in columns)
        ]
        assert len(fitted) == 1, (cell, [lines[index] for index in fitted])
        fitting[fitted[0]] += 1
        run, line = run_of(slug, cell), lines[fitted[0]]
        statistic = ("", 0.0) if isinstance(run, str) else (run.number_path, run.scale)
        assert statistic[0] == line["statistic"], (cell, run)
        assert statistic[1] == pytest.approx(float(line["scale"] or 0)), (cell, run)
    assert sorted(fitting) == list(range(len(lines))), "lines that fit no cell"
    assert fitting.total() == 4635


def test_every_addition_of_a_paper_adds_to_a_cell() -> None:
    """A name under `at` that no cell has is a slip, as one that another column has."""
    for slug in papers():
        paper = read_paper(slug)
        printed = [cell for number in paper.tables for cell in read_cells(paper, number)]
        names = {
            column: {getattr(cell, column) for cell in printed}
            for column in ("model", "method", "budget", "benchmark", "metric")
        }
        names["benchmark"] |= {place(cell) for cell in printed}
        entries = [entry for part in PARTS for entry in getattr(paper, part).values()]
        entries += [entry for table in paper.tables.values() for entry in table.methods.values()]
        additions = [table.overrides for table in paper.tables.values()]
        for entry in entries:
            for column, added in ({} if isinstance(entry, str) else entry.get("at", {})).items():
                assert added.keys() <= names[column]
                additions += added.values()
        tables = [entry for entry in (*entries, *additions) if not isinstance(entry, str)]
        keys = {key for table in tables for key in table}
        for key in keys - {*NUMBER_KEYS, *FIRST, "at"}:
            section, dot, _ = key.lstrip("+").partition(".")
            assert (section in SECTIONS, dot) == (True, "."), key


@pytest.mark.parametrize("column", ["table", "model", "benchmark", "metric", "paper"])
def test_a_method_may_be_called_as_anything_else_is(column: str, tmp_path: Path) -> None:
    """A method under the name of another column's is met in its own column alone."""
    same = {
        "table": "1",
        "model": "Small",
        "benchmark": "Rec",
        "metric": "accuracy",
        "paper": "Toy",
    }
    name = same[column]
    folder = write_paper(tmp_path)
    added = f'{{accuracy: {{of: a.b, at: {{method: {{"{name}": {{of: c.d}}}}}}}}'
    text = PAPER.replace("metrics: {accuracy: {}", f"metrics: {added}")
    (folder / "toy.yaml").write_text(text.replace("Fast: {", f'"{name}": {{'))
    path = folder / "toy_table1.csv"
    path.write_text(path.read_text().replace(",Fast,", f",{name},"))
    paper = read_paper("toy", folder)
    assert {
        cell.method: run.number_path
        for cell in read_cells(paper, "1", folder)
        if isinstance(run := run_of_cell(paper, cell), CellRun)
    } == {"Full": "a.b", name: "c.d"}


#: Lines of a paper that print the same numbers by other methods, or by two settings that come to the same.
TWINS = {
    ("LLaVA-OV-7B", "1% visual KV", "SnapKV", "Continuous window (32)"),
    ("DeepSeek-OCR-Base", "fixed, 192 tokens", "RTPrune (z=1.0)", "RTPrune (alpha=0.0)"),
}


def test_lines_that_print_the_same_numbers_are_of_one_run() -> None:
    """FastV of RTPrune's Table 1 is Table 7's layer 2, and so are all others that are printed twice, rounded or not."""
    for slug in papers():
        lines: dict[tuple[str, ...], dict[tuple[str, str], PrintedCell]] = defaultdict(dict)
        for cell in (cell for name, cell in cells() if name == slug and cell.value):
            line = lines[cell.table, cell.model, cell.method, cell.budget]
            line[cell.benchmark, cell.metric + cell.split] = cell
        pairs = ((a, b) for a in lines for b in lines if a[0] < b[0] and a[1] == b[1])
        for first, second in pairs:
            shared = lines[first].keys() & lines[second].keys()
            both = [(lines[first][key], lines[second][key]) for key in shared]
            if len(both) < 3 or not all(_printed_alike(a, b) for a, b in both):
                continue
            if (first[1], first[3], first[2], second[2]) in TWINS:
                continue
            for a, b in both:
                runs = [
                    run for run in (run_of(slug, a), run_of(slug, b)) if isinstance(run, CellRun)
                ]
                assert len({_settled(run) for run in runs}) <= 1, (first, second)


def _printed_alike(first: PrintedCell, second: PrintedCell) -> bool:
    digits = min(first.digits, second.digits)
    return abs(first.number - second.number) <= 0.5 * 10.0**-digits + 1e-9


def _settled(run: CellRun) -> str:
    """Return a run with the hyper-parameters that it leaves to the method's file."""
    others = {k: v for k, v in run.overrides.items() if not k.startswith("method")}
    return f"{sorted(others.items())} {method_of(run)}"


def test_fastv_of_deepseek_ocr_runs_the_layer_of_each_table() -> None:
    def layers(number: str) -> set[object]:
        runs = [
            run_of("rtprune", cell)
            for cell in read_cells(read_paper("rtprune"), number)
            if cell.method == "FastV"
        ]
        return {method_of(run)[2]["K"] for run in runs if isinstance(run, CellRun)}

    assert layers("1") == {3}
    # The GFLOPs of Table 4 are those of two whole layers.
    assert layers("4") == layers("3") == {UNPRUNED_LAYERS["FastV"]} == {2}


def test_averages_with_a_cell_that_is_not_compared_are_not_compared() -> None:
    split = "the paper has GQA_lite (A.2); this is all of test-dev"
    for number in ("1", "6"):
        table = build("d3tom", number, ResultIndex([]))
        gqa = [filled for filled in table.filled if filled.cell.benchmark == "GQA"]
        assert gqa
        assert {filled.mismatch for filled in gqa} == {split}
        averages = [
            filled
            for filled in table.filled
            if filled.cell.benchmark == "Avg" and filled.cell.value
        ]
        assert averages
        assert {filled.mismatch for filled in averages} == {f"with GQA: {split}"}
    for number in ("3", "5"):
        table = build("d3tom", number, ResultIndex([]))
        assert not any(filled.mismatch for filled in table.filled if filled.cell.metric != "TFLOPs")
