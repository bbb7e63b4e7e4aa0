"""Overhead of sessions, selection, batching and memory: `python -m lab.bench.speed_bench` (`make bench`).

One process measures everything, so ratios are comparable. Parts (`--only a,b`
selects some):

    machinery   generate in a session at ratio 0 relative to plain generate, in turns
    selection   each method's selection relative to the similarity product of the same tokens
    batching    samples/s of an evaluation with batch 8 relative to batch 1
    memory      peak memory, and the cache of one sample
    samples     500 samples of seedling_vqa

`--quick` repeats less. A table comes first; the last line of stdout is one JSON object with every
figure.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict

import torch
import transformers
from rich.console import Console
from rich.table import Table

from espalier.harness.errors import unknown_name
from espalier.harness.runs.environment import device_name
from lab.bench.bench_page import bench_command, parser, say
from lab.bench.bench_setup import Figure, Setup
from lab.bench.run_bench import batching, machinery, memory, samples
from lab.bench.selection_times import selection

PARTS: Mapping[str, Callable[[Setup], list[Figure]]] = {
    "machinery": machinery,
    "selection": selection,
    "batching": batching,
    "memory": memory,
    "samples": samples,
}

SCHEMA = 1


@bench_command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested parts; return 2 for bad input, else 0 (also if targets are missed)."""
    options = _options(argv)
    names = choose(options.only)
    setup = Setup(model=options.model, quick=options.quick)
    figures: list[Figure] = []
    for name in names:
        print(f"bench: {name}", file=sys.stderr, flush=True)
        with contextlib.redirect_stdout(sys.stderr):
            figures += PARTS[name](setup)
    print_table(figures)
    say(summary(figures, setup))
    return 0


def choose(only: str | None, parts: Iterable[str] | None = None) -> tuple[str, ...]:
    """Return the parts named in a comma-separated list, from `parts` (default: those here) and in their order.

    None selects all.

    Raises:
        UserError: an unknown part.
    """
    valid = tuple(PARTS if parts is None else parts)
    if only is None:
        return valid
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in valid:
            raise unknown_name("--only", name, valid)
    return tuple(name for name in valid if name in names)


def summary(figures: Sequence[Figure], setup: Setup) -> dict[str, object]:
    """Return the last line: every figure, with its measurement conditions."""
    machine = conditions(setup.spec().model.device)
    return {
        "schema": SCHEMA,
        "figures": [{**asdict(figure), "met": figure.met} for figure in figures],
        "conditions": {"model": setup.model, "quick": setup.quick, **machine},
    }


def conditions(device: str) -> dict[str, object]:
    """Return the conditions, besides the code, that figures on `device` depend on."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "device": device,
        "device_name": device_name(device),
    }


def print_table(figures: Sequence[Figure]) -> None:
    """Print one line for each figure: value, interval or quartiles, target and verdict."""
    table = Table()
    for title in ("part", "measured", "value", "spread", "target", ""):
        table.add_column(title, justify="right" if title in ("value", "spread") else "left")
    for figure in figures:
        spread = "" if figure.spread is None else "{:.3g} .. {:.3g}".format(*figure.spread)
        value = f"{figure.value:.4g} {figure.unit}"
        table.add_row(figure.part, figure.name, value, spread, _target(figure), figure.verdict)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _target(figure: Figure) -> str:
    if figure.at_most is not None:
        return f"<= {figure.at_most:g}"
    return "" if figure.at_least is None else f">= {figure.at_least:g}"


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    arguments = parser("speed")
    arguments.add_argument("--only", help=f"comma-separated parts: {', '.join(PARTS)}")
    arguments.add_argument("--quick", action="store_true", help="fewer repeats and samples")
    arguments.add_argument("--model", default="seedling", help="a name in conf/model")
    return arguments.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
