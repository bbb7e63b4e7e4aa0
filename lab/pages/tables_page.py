"""docs/tables.md, written from results/papers and conf: `python -m lab.pages.tables_page --write docs/tables.md`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from espalier.harness.config.grids import stand_ins
from espalier.harness.reports.tables.cell_runs import CellRun, choice, run_of_cell
from espalier.harness.reports.tables.published_tables import (
    Paper,
    display_name,
    name_of,
    papers,
    read_cells,
    read_paper,
)
from espalier.harness.specs.commands import command
from lab.pages.page_writer import print_or_write, table

HEAD = """\
# Published tables

<!-- Written by `python -m lab.pages.tables_page --write docs/tables.md` (`make docs`). -->

The results tables of five papers are data ([results/papers](../results/README.md) names those that are not), each a
preset that runs its cells, and a command that rebuilds it from what is stored, lines grouped by model as printed.
Figures that show results are rebuilt the same way; none of their numbers is printed, so that nothing is compared.

```sh
python run.py -m +experiment=d2pruner_table1                 # the runs of a table; takes published checkpoints
python -m espalier tables d2pruner 1                          # the table: measured beside printed, and what is missing
python -m espalier tables all --out tables                    # all of them, each as .md, .tex, .csv and .html
python -m espalier tables d2pruner fig4 --out tables          # a figure: its points, and the picture as .svg and .png

python run.py -m +experiment=d2pruner_table1 model=seedling limit=20      # the same grid on the embedded model
python -m espalier tables d2pruner 1 --model seedling
```

On the command line `method=fastv`, `ratio=0.9` and `benchmark=pope` pick out of a preset's grids what they have of it.
On the embedded models other benchmarks stand for the published ones ([conf/stand_ins.yaml](../conf/stand_ins.yaml)),
and nothing measured there is compared with print.

Every cell shows what was measured and on how many samples, what is printed, what a formula gives (`=`, or `≠` where
the print is known to be wrong), the difference and a verdict; a missing one the command that fills it.

A cell that was measured is **near** its printed number if the two differ by at most half a point (0.005 of a fraction,
10 of MME's score, 0.05 of a mean accepted length,
and half a unit of the last printed digit), **within error** if by at most 1.96 standard errors, else
**FAR**; times, speeds and sizes are another machine's and not judged. Averages are given by the paper's own rule and
over the benchmarks that all rows of a model have; a printed one that does not follow from the cells beside it, whatever
rounding took, is marked. Rows that cannot stand in one table are named and left out: of another schema, another number
of samples (`--limit`), another position policy (`--positions`), damaged ones, runs that are not finished. A row fills a
cell if it has every setting that the preset's run has: its overrides, and weights, prompt set, pixels, frames,
generation, text, draft and hyper-parameters as the files of `conf/` have them where the preset sets none; a cell for
which there are rows of other settings alone names them. Precision, kernels and batch sizes count where a preset sets
them. Of rows of one cell the newest counts, which is said; so are several versions of code in one table.

The columns *run*, *formula* and *embedded model* say what can rebuild a table: how many cells a run fills, which takes
a published checkpoint; whether a formula gives some of them; which embedded model the grid runs on offline.
"""


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for slug in papers():
        paper = read_paper(slug)
        rows = [_row(paper, number) for number in paper.tables]
        head = (
            "table",
            "what",
            "cells",
            "run",
            "formula",
            "embedded model",
            "fills it",
            "rebuilds it",
        )
        parts.append(
            f"## {paper.paper}\n\n{paper.title} ({paper.venue}, "
            f"[arXiv {paper.arxiv}](https://arxiv.org/abs/{paper.arxiv})).\n\n" + table(head, rows)
        )
        parts += filter(None, (_reasons(paper), _uncompared(paper)))
    return "\n".join(parts)


def _row(paper: Paper, number: str) -> tuple[str, ...]:
    entry, cells = paper.tables[number], read_cells(paper, number)
    runs = [run for run in (run_of_cell(paper, cell) for cell in cells) if isinstance(run, CellRun)]
    name = name_of(paper.slug, number)
    return (
        display_name(number).replace("Table ", ""),
        entry.title,
        str(len(cells)) + (", no numbers printed" if entry.grid else ""),
        f"{len(runs)}, needs checkpoints" if runs else "-",
        "yes" if "analytic" in entry.rebuilt else "-",
        _embedded(runs),
        f"`python run.py -m +experiment={name}`" if runs else "-",
        f"`python -m espalier tables {paper.slug} {number}`",
    )


def _embedded(runs: Sequence[CellRun]) -> str:
    embedded = stand_ins()
    if not runs or any(run.overrides["benchmark"] not in embedded.benchmarks for run in runs):
        return "-"
    denoises = any(_denoises(str(run.overrides["model"])) for run in runs)
    return "`model=seedling_diffusion`" if denoises else "`model=seedling`"


def _denoises(model: str) -> bool:
    return bool(choice("model", model).get("facts", {}).get("diffusion"))


def _reasons(paper: Paper) -> str:
    return _listed(
        "Cells that no run fills",
        paper,
        lambda run: run if isinstance(run, str) else "",
    )


def _uncompared(paper: Paper) -> str:
    return _listed(
        "Cells that a run fills, not to be compared with print",
        paper,
        lambda run: run.mismatch if isinstance(run, CellRun) else "",
    )


def _listed(title: str, paper: Paper, reason_of: Callable[[CellRun | str], str]) -> str:
    """Return the number of printed cells per reason, by table; empty without reasons."""
    reasons: dict[str, dict[str, int]] = {}
    for number in paper.tables:
        for cell in read_cells(paper, number):
            reason = reason_of(run_of_cell(paper, cell)) if cell.value else ""
            if reason:
                counts = reasons.setdefault(reason, {})
                counts[number] = counts.get(number, 0) + 1
    lines = [
        f"- {reason}: "
        + ", ".join(
            f"{count} of {display_name(number).lower()}" for number, count in counts.items()
        )
        for reason, counts in reasons.items()
    ]
    return f"{title}:\n\n" + "\n".join(lines) + "\n" if lines else ""


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the page, or write it."""
    return print_or_write(page, "lab.pages.tables_page", __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
