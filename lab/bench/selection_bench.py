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
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lab.bench.bench_page import bench_command, leave, parser, say, verdict
from lab.bench.bench_setup import Setup
from lab.bench.select_parts import growth, ratios
from lab.bench.selection_times import one_thread
from lab.bench.speed_bench import conditions

SCHEMA = 1
COLUMNS = ("method", "N", "D", "keep", "cosines", "ms", "ratio", "target", "growth", "MiB more", "")
#: For the process that measures memory: freed arrays of a MiB and more are returned to the system.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}


@bench_command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 2 for bad input, else 0 (also if targets are missed)."""
    options = _options(argv)
    setup = Setup(model=options.model, quick=options.quick)
    with contextlib.redirect_stdout(sys.stderr), one_thread(), torch.inference_mode():
        if options.part == "growth":
            rows, notes = growth(setup, options.only)
        else:
            rows, notes = ratios(setup, options.only), []
        machine = conditions("cpu")
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "rows": [{**asdict(row), "met": row.met} for row in rows],
        "notes": notes,
        "conditions": machine,
    }
    if options.part is None:
        second = _second_process(argv)
        result["rows"] += second["rows"]
        result["notes"] += second["notes"]
    if options.part != "growth":
        print_table(result["rows"], result["notes"])
    if options.write is not None:
        write(result, options.write, "bench_select" + "_only" * bool(options.only))
    say(result)
    return 0


def _second_process(argv: Sequence[str] | None) -> dict[str, Any]:
    """Run the part `growth` in its own process, which returns freed memory to the system."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = [sys.executable, "-m", "lab.bench.selection_bench", "--part", "growth", *arguments]
    if "--write" in command:
        place = command.index("--write")
        del command[place : place + 2]
    done = subprocess.run(
        command,
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


def print_table(rows: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> None:
    """Print the rows, then the notes."""
    table = Table()
    for title in COLUMNS:
        words = title in ("method", "cosines", "target", "")
        table.add_column(title, justify="left" if words else "right")
    for row in rows:
        table.add_row(*cells(row))
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    for note in notes:
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


def write(result: Mapping[str, Any], folder: Path, name: str = "bench_select") -> None:
    """Write the rows as JSON and as a page."""
    lines = ["| " + " | ".join(COLUMNS) + " |"]
    numbers = [title not in ("method", "cosines", "target", "") for title in COLUMNS]
    lines.append("| " + " | ".join("---:" if right else "---" for right in numbers) + " |")
    lines += ["| " + " | ".join(cells(row)) + " |" for row in result["rows"]]
    lines += ["", *(f"- {note}" for note in result["notes"])]
    page = PAGE.format(**result["conditions"]) + "\n".join(lines) + "\n"
    leave(folder, name, page, result)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    arguments = parser("select", "bench_select")
    arguments.add_argument(
        "--part", choices=("ratios", "growth"), help="run only this part; default: both"
    )
    arguments.add_argument("--quick", action="store_true", help="two rounds")
    arguments.add_argument(
        "--only", type=lambda text: text.split(","), default=(), help="names in conf/method"
    )
    arguments.add_argument("--model", default="seedling", help="a name in conf/model")
    return arguments.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
