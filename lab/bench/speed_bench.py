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
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from lab.bench.bench_page import Bench, choose, conditions
from lab.bench.bench_setup import Figure, Setup, figures_of, print_table
from lab.bench.run_bench import batching, machinery, memory, samples
from lab.bench.selection_times import selection

PARTS: Mapping[str, Callable[[Setup], list[Figure]]] = {
    "machinery": machinery,
    "selection": selection,
    "batching": batching,
    "memory": memory,
    "samples": samples,
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the requested parts."""
    setup = Setup(model=options.model, quick=options.quick)
    figures: list[Figure] = []
    for name in choose(options.only, PARTS):
        print(f"bench: {name}", flush=True)
        figures += PARTS[name](setup)
    machine = conditions(setup.spec().model.device)
    return {
        "figures": [{**asdict(figure), "met": figure.met} for figure in figures],
        "conditions": {"model": setup.model, "quick": setup.quick, **machine},
    }


BENCH = Bench(
    "speed_bench",
    measure,
    lambda result: print_table(figures_of(result)),
    options={
        "--only": {"help": f"comma-separated parts: {', '.join(PARTS)}"},
        "--quick": {"action": "store_true", "help": "fewer repeats and samples"},
        "--model": {"default": "seedling", "help": "a name in conf/model"},
    },
)
main = BENCH.main


if __name__ == "__main__":
    sys.exit(main())
