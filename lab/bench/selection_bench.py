"""Cost of token selection: `python -m lab.bench.selection_bench` (`make bench-select`).

Every configured token reducer is timed against the plain product X X^T of the same tokens, in fp32 on one thread, as
processor time, which varies less than wall time on a shared machine. Two parts, each in its own process:

    ratios   576 and 2,880 tokens of width 4096, a ninth kept
    growth   2,880 and 25,088 tokens of width 1024, a tenth kept: growth exponent, peak memory, and for
             methods with an optional N x N matrix both with and without it

`--write FOLDER` writes bench_select.md and .json there, or bench_select_only.md and .json with `--only`. A table comes
first; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from espalier.harness.reports.printed_text import markdown_table
from lab.bench.bench_page import Bench, conditions, verdict
from lab.bench.bench_setup import Setup
from lab.bench.select_parts import growth, ratios

COLUMNS = ("method", "N", "D", "keep", "cosines", "ms", "ratio", "target", "growth", "MiB more", "")
#: Those of words, on the left.
WORDS = ("method", "cosines", "target", "")
#: For the process that measures memory: freed arrays of a MiB and more are returned to the system.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of the requested part, or of both."""
    setup = Setup(model=options.model, quick=options.quick)
    if options.part == "growth":
        rows, notes = growth(setup, options.only)
    else:
        rows, notes = ratios(setup, options.only), []
    result: dict[str, Any] = {
        "rows": [{**asdict(row), "met": row.met} for row in rows],
        "notes": notes,
        "conditions": conditions("cpu"),
    }
    if options.part is None:
        second = _second_process(options)
        result["rows"] += second["rows"]
        result["notes"] += second["notes"]
    return result


def _second_process(options: argparse.Namespace) -> dict[str, Any]:
    """Run the part `growth` in its own process, which returns freed memory to the system."""
    words = ["--part", "growth", "--model", options.model, *["--quick"] * options.quick]
    words += ["--only", ",".join(options.only)] if options.only else []
    done = subprocess.run(
        [sys.executable, "-m", "lab.bench.selection_bench", *words],
        env={**os.environ, **RETURNED},
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one line of the table, in the order of `COLUMNS`."""
    spread = row["quartiles"]
    target = [f"<= {row['at_most']:g}"] if row["at_most"] is not None else []
    if row["growth_at_most"] is not None:
        target.append(f"growth <= {row['growth_at_most']:g}")
    if row["peak_at_most"] is not None:
        target.append(f"<= {row['peak_at_most']:g} MiB")
    return (
        row["name"],
        f"{row['n']:,}",
        f"{row['width']:,}",
        f"{row['keep']:,}",
        row["way"],
        f"{row['ms']:,.4g}" if row["ms"] < 1000 else f"{row['ms']:,.0f}",
        f"{row['ratio']:.3g}" + ("" if spread is None else " [{:.3g}, {:.3g}]".format(*spread)),
        ", ".join(target),
        "" if row["growth"] is None else f"{row['growth']:.2f}",
        "" if row["peak_mib"] is None else f"{max(0.0, row['peak_mib']):,.0f}",
        verdict(row["met"]),
    )


def show(result: Mapping[str, Any]) -> None:
    """Print the rows, then the notes."""
    table = Table()
    for title in COLUMNS:
        table.add_column(title, justify="left" if title in WORDS else "right")
    for row in result["rows"]:
        table.add_row(*cells(row))
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    for note in result["notes"]:
        console.print(note)


PAGE = """# Selection: time over the similarity product

Written by `make bench-select` on {device_name} ({threads} thread, fp32), torch {torch}, load average
{load_average:.1f}. `ratio` is the time of a selection, merging included, over the plain product X X^T of the same N
tokens of width D, without normalisation, in the same process and in turns: median, quartiles in brackets. Times are
processor time, medians.

Methods that compare all tokens (`divprune`, `d2pruner`, `cdpruner`) multiply out the upper triangle only, and so can
stay below 1. They hold the N x N matrix of cosines if it takes at most 64 MiB or half of the free memory, of the
machine or of the CUDA device (`fits` in `methods/select/cosines.py`; `memory_limit` sets another limit), and compute
its rows in small panels when they are needed otherwise. `cosines` names the way if both were measured.

From 25,088 tokens on: one call each, `growth` is the exponent of time in N between 2,880 and 25,088 tokens with a tenth
kept, `MiB more` the peak of the resident set during the call over that before it, in a process that gives freed memory
back at once. The factor of a determinantal process (`cdpruner`) has keep x N numbers and costs keep^2 N: its growth
goes towards 3.

"""


def page(result: Mapping[str, Any]) -> str:
    """Return the page in Markdown."""
    align = "".join("l" if title in WORDS else "r" for title in COLUMNS)
    notes = "\n".join(f"- {note}" for note in result["notes"])
    table = markdown_table(COLUMNS, map(cells, result["rows"]), align)
    return f"{PAGE.format(**result['conditions'])}{table}\n{notes}"


BENCH = Bench(
    "selection_bench",
    measure,
    show,
    page,
    {
        "--part": {
            "choices": ("ratios", "growth"),
            "help": "run only this part; default: both",
        },
        "--quick": {"action": "store_true", "help": "two rounds"},
        "--only": {
            "type": lambda text: text.split(","),
            "default": (),
            "help": "names in conf/method",
        },
        "--model": {"default": "seedling", "help": "a name in conf/model"},
    },
    name="bench_select",
    parts_page=True,
    one_thread=True,
)
main = BENCH.main


if __name__ == "__main__":
    sys.exit(main())
