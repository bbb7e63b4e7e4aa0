"""Write a preset for each published table that runs can fill.

`python -m espalier.harness.reports.tables.table_presets --write conf/experiment`

A preset holds the runs of all cells of `python -m espalier tables`, in as few grids as possible. It is an ordinary
file; only this command overwrites one that was edited by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from espalier.harness.reports.tables.cell_runs import Wanted, text, wanted
from espalier.harness.reports.tables.panels import display_name, name_of
from espalier.harness.reports.tables.published_tables import Paper, papers, read_cells, read_paper
from espalier.harness.specs.commands import command
from espalier.harness.store.files.folder_checks import check_folder

#: Keys of a grid whose values are lists.
LISTED = ("method", "ratio", "benchmark")

Grid = dict[str, Any]


def runs_of(paper: Paper, number: str) -> list[Mapping[str, Any]]:
    """Return the runs of a table's cells, each once, in printed order."""
    runs: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for cell in read_cells(paper, number):
        run = wanted(paper, cell)
        if isinstance(run, Wanted):
            runs.setdefault(run.line, run.overrides)
    return list(runs.values())


def grids(runs: Sequence[Mapping[str, Any]]) -> list[Grid]:
    """Return grids whose products are these runs; benchmarks, methods and ratios are joined where all else is equal."""
    merged: list[Grid] = [{**run, **{key: (text(run[key]),) for key in LISTED}} for run in runs]
    for key in ("benchmark", "method", "ratio"):
        joined: dict[tuple[Any, ...], Grid] = {}
        for grid in merged:
            remainder = tuple(
                sorted((name, str(value)) for name, value in grid.items() if name != key)
            )
            if remainder in joined:
                joined[remainder][key] += grid[key]
            else:
                joined[remainder] = dict(grid)
        merged = list(joined.values())
    return merged


def preset(paper: Paper, number: str) -> str | None:
    """Return the text of a table's preset; None if no run fills a cell."""
    preset_grids = grids(runs_of(paper, number))
    if not preset_grids:
        return None
    name = name_of(paper.slug, number)
    entry = paper.tables[number]
    about = (
        f"{paper.paper} (arXiv {paper.arxiv}), {display_name(number)}: {entry.title}. "
        f"`python run.py -m +experiment={name}`, then `python -m espalier tables {paper.slug} {number}`. On the "
        "embedded model and what stands for the benchmarks (conf/stand_ins.yaml): model=seedling here, --model "
        "seedling there. Cells that cannot run are left out and listed."
    )
    lines = [
        "# @package _global_",
        fill(about, 126, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False),
        "refused: skip",
    ]
    if not any(needs_times(paper, number)):
        lines += ["engine:", "  paired: 0 # accuracy is what these rows are for"]
    lines += ["", "hydra:", "  mode: MULTIRUN", "", "grids:"]
    for grid in preset_grids:
        for index, (key, value) in enumerate(grid.items()):
            value_text = ",".join(value) if key in LISTED else text(value)
            lines.append(f"  {'-' if index == 0 else ' '} {key}: {_quoted(value_text)}")
    return "\n".join(lines) + "\n"


def needs_times(paper: Paper, number: str) -> Iterator[bool]:
    """Yield for each cell whether its number is a time, a count or a size."""
    for cell in read_cells(paper, number):
        run = wanted(paper, cell)
        yield isinstance(run, Wanted) and not run.number_path.startswith("metrics.")


def _quoted(value: str) -> str:
    return f'"{value}"' if "$" in value else value


def write(folder: Path) -> list[Path]:
    """Write all presets; return the files."""
    written = []
    for slug in papers():
        paper = read_paper(slug)
        for number in paper.tables:
            content = preset(paper, number)
            if content is not None:
                written.append(folder / f"{name_of(slug, number)}.yaml")
                written[-1].write_text(content, encoding="utf-8")
    return written


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Write the presets; exit code 2 and one line if a table cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m espalier.harness.reports.tables.table_presets", description=__doc__
    )
    parser.add_argument("--write", type=Path, required=True, help="folder of presets")
    options = parser.parse_args(argv)
    check_folder("--write", options.write)
    written = write(options.write)
    print(f"{len(written)} presets in {options.write}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
