"""Benchmarks that need a GPU: `python -m lab.bench.gpu_bench` (`make bench-gpu`).

Large models have random weights at their real widths and depth; nothing is downloaded. Parts (`--only a,b`):

    checks      what only a card can tell: the doctor's checks (graphs, streams, spread layers, FlashAttention), the
                kernels of attention in bfloat16, a prompt's peak against its rehearsal
    engine      prefill against bounds from FLOPs and single layers, overhead at ratio 0, memory; decoding against the
                bandwidth of the memory
    select      every selection relative to the similarity product at 576, 2,880 and 25,088 tokens
    decoding    answers of the embedded pair, on one GPU and on two; steps of a 7B target and a 0.5B draft
                after 25,088 visual tokens, and with a draft that sees a tenth of them

`lab.bench.gpu_setup` plans the repetitions, for ten minutes on one GPU in total. `--write
FOLDER` writes bench_gpu.md and .json there after every part; parts that an earlier run measured there on the same
machine, versions and code stay. A failed part (e.g. out of memory) becomes a line on the page. A table comes first;
the last line of stdout is one JSON object. Exit code: 2 for bad input or no GPU, 1 if a part failed, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from espalier.harness.errors import UserError
from lab.bench.bench_page import bench_command, choose, parser, say
from lab.bench.bench_setup import Figure, print_table
from lab.bench.gpu_page import PartOutcome, earlier, result_of, surroundings, write
from lab.bench.gpu_setup import SMALL, GpuPlan, tried

if TYPE_CHECKING:
    from lab.bench.gpu_setup import Found, Note

Part = Callable[["GpuPlan"], "Found"]


def parts() -> Mapping[str, Part]:
    """Return the parts by name, in order."""
    # The parts take two seconds to import, which --help does not need.
    from lab.bench.gpu_decode import decoding
    from lab.bench.gpu_parts import checks, engine, select

    return {"checks": checks, "engine": engine, "select": select, "decoding": decoding}


@bench_command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; missed targets do not change the exit code."""
    options = _options(argv)
    arguments = parts()
    names = choose(options.only, arguments)
    plan = plan_for(options.device)
    machine = surroundings(plan.device)
    outcomes = {} if options.write is None else earlier(options.write, machine)
    for name in names:
        print(f"bench-gpu: {name}", file=sys.stderr, flush=True)
        with contextlib.redirect_stdout(sys.stderr):
            outcomes[name] = measured(name, arguments[name], plan)
        outcomes = {part: outcomes[part] for part in arguments if part in outcomes}
        if options.write is not None:
            write(result_of(outcomes, plan.counts(), machine), options.write)
    print_table([figure for outcome in outcomes.values() for figure in outcome.figures])
    for outcome in outcomes.values():
        for line in outcome.remarks():
            print(line)
    say(result_of(outcomes, plan.counts(), machine))
    return 1 if any(note.failed for name in names for note in outcomes[name].notes) else 0


def plan_for(device: str) -> GpuPlan:
    """Return the plan for a device: the full one for a GPU, the small one for a CPU.

    Raises:
        UserError: this machine has no such GPU.
    """
    if device == "cpu":
        return SMALL
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise UserError("bench-gpu needs a CUDA device; torch sees none on this machine")
    return replace(GpuPlan(), device="cuda:0", second="cuda:1" if count > 1 else None)


def measured(name: str, part: Part, plan: GpuPlan) -> PartOutcome:
    """Run one part; figures from before a failure count, and its memory is released."""
    started = perf_counter()
    figures: list[Figure] = []
    notes: list[Note] = []
    for result in tried(name, part(plan)):
        if isinstance(result, Figure):
            figures.append(result)
        else:
            print(f"bench-gpu: {result.text}", file=sys.stderr, flush=True)
            notes.append(result)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return PartOutcome(tuple(figures), tuple(notes), perf_counter() - started)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    arguments = parser("gpu", "bench_gpu")
    arguments.add_argument("--only", help="comma-separated parts: checks, engine, select, decoding")
    # cpu: runs every part in seconds as a smoke test; its figures mean nothing.
    arguments.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS
    )
    return arguments.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
