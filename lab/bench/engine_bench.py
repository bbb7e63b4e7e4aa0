"""Compares measured and theoretical gains of dropping tokens: `python -m lab.bench.engine_bench`.

A real architecture with random weights answers one prompt that consists mostly of visual tokens:

    prefill     speed-up at `--ratio` over the full run, and its bounds from exact FLOPs and from single layers
    machinery   generate in a session at ratio 0 relative to plain generate, in turns
    memory      peak memory of one call, full and reduced

`--model` and further `key=value` overrides choose the instance; `--write FOLDER` writes `bench_engine.json` and
`bench_engine.md` there. A table comes first; the last line of stdout is one JSON object with every figure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from espalier.harness.cost.clock import drain
from espalier.harness.cost.memory import peak_memory
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.tools.calibration.calibration_images import question
from lab.bench import prefill_bench as bench_prefill
from lab.bench.bench_page import DEVICE, THREADS, Bench, conditions, measured_on
from lab.bench.bench_setup import (
    Figure,
    figures_of,
    paired,
    print_table,
    reducer,
    spec_of,
    table_lines,
)

if TYPE_CHECKING:
    from espalier.harness.cost.budget import Budget
    from espalier.harness.engine.record import SampleRecord
    from espalier.harness.models.adapter import Adapter
    from espalier.methods.base import TokenReducer

#: A full-size decoder, small enough for a laptop, with a prompt so long that matrix products take nearly all
#: of the time; the tower, which no method here speeds up, has one layer.
INSTANCE = (
    "model=llava_ov_0_5b",
    "model.weights=random",
    "model.dtype=bfloat16",
    "model.scale.tower_layers=1",
)

#: Timed methods: one with free selection, one that selects by attention rows.
METHODS = ("method=uniform_layer2", "method=fastv")

#: Image size in pixels; AnyRes splits it into four crops and a global view.
EDGE = 768


@dataclass(frozen=True)
class EngineInstance:
    """A model with random weights, a prompt, and the runs to compare."""

    overrides: tuple[str, ...]
    adapter: Adapter
    inputs: Mapping[str, Any]

    @classmethod
    def build(cls, overrides: Sequence[str]) -> EngineInstance:
        """Build the model and encode one noise image with a short question."""
        adapter = load_adapter(spec_of(*overrides).model)
        return cls(tuple(overrides), adapter, adapter.encode([_chat(EDGE)]))

    def spec(self, *overrides: str) -> RunSpec:
        """Return the run of one method on this instance."""
        return spec_of(*self.overrides, *overrides)

    def reducer(self, *overrides: str) -> tuple[TokenReducer, Budget]:
        """Return the method and budget of a run, composed in advance because that takes as long as a small prefill."""
        spec = self.spec(*overrides)
        return reducer(spec), spec.budget

    def generate(self, run: tuple[TokenReducer, Budget], new_tokens: int = 1) -> SampleRecord:
        """Answer once through a session and return the telemetry."""
        # The engine imports transformers' models, two seconds that --help does not need.
        from espalier.harness.engine.session import Session

        # Random weights may generate the end token at any time.
        length = {"min_new_tokens": new_tokens} if new_tokens > 1 else {}
        with Session(self.adapter, *run) as session:
            done = session.generate(
                self.inputs, None, do_sample=False, max_new_tokens=new_tokens, **length
            )
        return done.records[0]


def prefill(instance: EngineInstance, ratio: float, repeats: int) -> list[Figure]:
    """Time the prefill of each method and of the full run in turns, and compare their ratios with the bounds."""
    full = instance.reducer("method=none")
    runs = {bench_prefill.FULL: lambda: instance.generate(full)}
    for method in METHODS:
        reduced = instance.reducer(method, f"ratio={ratio}")
        name = f"{method.removeprefix('method=')}, ratio {ratio}"
        runs[name] = partial(instance.generate, reduced)
    return bench_prefill.prefill(instance.adapter, runs, repeats)


def machinery(instance: EngineInstance, repeats: int) -> list[Figure]:
    """Time `generate` in a session at ratio 0 against the model's own, in turns on equal inputs.

    A session adds milliseconds to seconds, less than the noise of a shared machine: on a CPU, processor time is
    counted, and the prompt is shorter. `lab.bench.speed_bench` measures the overhead on calls of milliseconds.
    """
    short = replace(instance, inputs=instance.adapter.encode([_chat(EDGE // 2)]))
    on_cpu = instance.adapter.device.type == "cpu"
    clock, unit = (process_time, "processor time") if on_cpu else (perf_counter, "time")
    figures = []
    cards = [device for device in short.adapter.devices if device.type == "cuda"]

    def plain() -> object:
        with torch.inference_mode():
            done = short.adapter.model.generate(**short.inputs, do_sample=False, max_new_tokens=1)
        drain(cards)  # a session also waits for its devices
        return done

    for method in ("method=none", "method=uniform", "method=uniform_layer2"):
        run = instance.reducer(method, "ratio=0")

        def through(run: tuple[TokenReducer, Budget] = run) -> object:
            return short.generate(run)

        pair = paired(through, plain, repeats, clock=clock)
        name = f"{unit} at ratio 0 over plain, {method.removeprefix('method=')}"
        figures.append(pair.figure("machinery", name, at_most=1.01))
        added = median(a - b for a, b in zip(pair.first, pair.second, strict=True))
        figures.append(Figure("machinery", f"added to one call, {name}", added * 1e3, "ms"))
    return figures


def memory(instance: EngineInstance, ratio: float) -> list[Figure]:
    """Measure the peak memory of an unreduced and a reduced call, weights included."""
    peaks = {}
    runs = {"full": ("method=none",), "reduced": (METHODS[0], f"ratio={ratio}")}
    for name, arguments in runs.items():
        run = instance.reducer(*arguments)
        with peak_memory(*instance.adapter.devices) as peak:
            record = instance.generate(run)
        peaks[name] = (peak.bytes, record.kv_bytes)
    unit = 2**20
    return [
        Figure("memory", f"peak, full: {peak.note}", peaks["full"][0] / unit, "MiB"),
        Figure("memory", f"peak, ratio {ratio} at layer 2", peaks["reduced"][0] / unit, "MiB"),
        Figure(
            "memory",
            "reduced peak over full",
            peaks["reduced"][0] / peaks["full"][0],
            "x",
            at_most=1.0,
        ),
        Figure("memory", "cache after prefill, full", peaks["full"][1] / unit, "MiB"),
        Figure("memory", "cache after prefill, reduced", peaks["reduced"][1] / unit, "MiB"),
    ]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the three parts on one instance."""
    instance = EngineInstance.build(tuple(options.overrides) or INSTANCE)
    figures = [
        *prefill(instance, options.ratio, options.repeats),
        *machinery(instance, options.repeats),
        *memory(instance, options.ratio),
    ]
    return {
        "instance": list(instance.overrides),
        "figures": [figure.entry() for figure in figures],
        "repeats": options.repeats,
        "conditions": conditions(str(instance.adapter.device)),
    }


def page(result: Mapping[str, Any]) -> str:
    """Return the page in Markdown."""
    figures = figures_of(result)
    machine = measured_on(result["conditions"], DEVICE, THREADS)
    lines = [
        "# Engine: measured against what the arithmetic allows",
        "",
        "Written by `make bench-engine`. "
        f"Instance `{' '.join(result['instance'])}` on {machine}. Prefill: "
        f"geometric means over {result['repeats']} rounds "
        "with 95 % intervals (Student's t on the logarithms), on a CPU in processor time of one thread; the rest: "
        "medians with quartiles.",
        "",
        *_looked_at(figures),
        *table_lines(figures),
    ]
    return "\n".join(lines)


def _looked_at(figures: Sequence[Figure]) -> list[str]:
    """Return the page's remarks on figures above their theoretical bound."""
    doubted = [figure.name for figure in figures if not figure.believable]
    if not doubted:
        return []
    return [
        f"Not believable by itself, its whole interval above its bound: {'; '.join(doubted)}. Looked at: the phase on "
        "both sides (the decoder stack alone; tower and output head are outside), masks (causal on both sides, none is "
        "built), a second timer, and single layers at both lengths, below. Where the share of what single layers allow "
        "is not above 1, a FLOP of the full run costs more than one of the short run, and the gain is real; where it "
        "is, something is left out.",
        "",
    ]


def _chat(edge: int) -> list[dict[str, Any]]:
    noise = torch.randint(
        0, 256, (edge, edge, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    return question(Image.fromarray(noise.numpy()), "What is shown in this image?")


BENCH = Bench(
    "engine_bench",
    measure,
    lambda result: print_table(figures_of(result)),
    page,
    {
        "overrides": {
            "nargs": "*",
            "help": f"instance overrides; default: {' '.join(INSTANCE)}",
        },
        "--ratio": {"type": float, "default": 0.9},
        "--repeats": {"type": int, "default": 5},
    },
    name="bench_engine",
)
main = BENCH.main


if __name__ == "__main__":
    sys.exit(main())
