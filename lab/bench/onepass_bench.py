"""Time saved by a sweep in one pass: `python -m lab.bench.onepass_bench` (`make bench-onepass`).

30 cells (6 methods at 5 ratios) are run cell by cell and in one pass (`engine.share=prefix`), in turns in one process,
each time into an empty store, with the model loaded; reading, answers, scores and rows are included. The possible
saving follows from the times of the N separate cells; layers are those before a method's first site:

    at best = 1 - (N - 1) / N * (reading + vision + layers) / total

`--write FOLDER` writes `bench_onepass.json` and `bench_onepass.md` there; `--only seedling` selects a model,
`--limit` the samples per cell, `--turns` the runs of each way.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from espalier.harness.config.build_spec import specs_of
from espalier.harness.engine.sites import unreduced_layers
from espalier.harness.kinds.lookup import kind_of, method_of
from espalier.harness.runs.model_pool import Pool
from espalier.harness.runs.runner import Runner
from espalier.harness.store import Store
from lab.bench.bench_page import Bench, choose, printed_page

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import RunSpec

#: Random, by tokens and by tower attention before the decoder, inside the decoder, in stages, and from the cache.
METHODS = "random,divprune,visionzip,fastv,pyramiddrop,snapkv"
RATIOS = "0.5,0.6,0.7,0.8,0.9"


@dataclass(frozen=True)
class SweepInstance:
    """A model and a benchmark.

    Attributes:
        overrides: command-line overrides.
        limit: samples per cell.
        target: largest share of the cell-by-cell time.
    """

    overrides: tuple[str, ...]
    limit: int
    target: float


INSTANCES: Mapping[str, SweepInstance] = {
    "seedling": SweepInstance(("model=seedling", "benchmark=seedling_rec"), 100, 0.45),
    # Adapter, views and vocabulary of LLaVA-NeXT with a tower and text stack small enough for a CPU.
    "llava_next": SweepInstance(
        (
            "model=llava_next_7b",
            "benchmark=seedling_rec",
            "model.weights=random",
            "model.dtype=float32",
            "model.device=cpu",
            "+model.architecture.text.head_dim=64",
            "model.facts.text={layers: 8, hidden: 256, intermediate: 688, heads: 4, kv_heads: 4, head_dim: 64}",
            "model.facts.tower={layers: 8, hidden: 256, intermediate: 1024, heads: 4, kv_heads: 4, head_dim: 64}",
            "model.facts.projector=[256, 256, 256]",
            "+benchmark.generation.max_new_tokens=8",
        ),
        4,
        0.5,
    ),
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of both ways for each instance."""
    names = choose(options.only, INSTANCES)
    return {
        "instances": {
            name: measured(INSTANCES[name], options.limit or INSTANCES[name].limit, options.turns)
            for name in names
        }
    }


def measured(instance: SweepInstance, limit: int, turns: int) -> dict[str, Any]:
    """Return the seconds of both ways, and the theoretical bound."""
    pool = Pool()
    settings = (
        f"method={METHODS}",
        f"ratio={RATIOS}",
        f"limit={limit}",
        "engine.paired=0",
        # A single pass has no warm-up, so the warm-up of separate cells is not counted as a saving.
        "engine.warmup=0",
        "json=false",
    )
    separate: list[float] = []
    together: list[float] = []
    sweep(pool, [*instance.overrides, *settings, "limit=2"], "none")  # loads and warms up
    spent: dict[str, float] = {}
    for turn in range(turns):
        for share in ("none", "prefix") if turn % 2 == 0 else ("prefix", "none"):
            seconds, phases = sweep(pool, [*instance.overrides, *settings], share)
            (separate if share == "none" else together).append(seconds)
            spent = phases or spent
    separate_s, together_s = min(separate), min(together)
    best = 1 - sum(spent[name] for name in ("reading", "vision", "layers")) / separate_s
    return {
        "overrides": list(instance.overrides),
        "limit": limit,
        "cells": len(specs_of("-m", *instance.overrides, *settings)),
        "alone_s": separate,
        "together_s": together,
        "ratio": together_s / separate_s,
        "target": instance.target,
        "spared_s": spent,
        "at_best": best,
    }


def sweep(pool: Pool, overrides: Sequence[str], share: str) -> tuple[float, dict[str, float]]:
    """Run a sweep into an empty store.

    Returns:
        The seconds, and for separate cells the seconds that one pass saves, by phase.
    """
    with TemporaryDirectory(prefix="espalier-onepass-") as folder:
        specs = specs_of("-m", *overrides, f"engine.share={share}", f"store={folder}")
        runner = Runner(sweep=True, pool=pool)
        runner.admit(specs)
        started = time.perf_counter()
        for cell in runner.admitted:
            runner.run(cell)
        seconds = time.perf_counter() - started
        return seconds, spared(runner, Path(folder)) if share == "none" else {}


def spared(runner: Runner, store: Path) -> dict[str, float]:
    """Return the seconds that one pass saves over a sweep cell by cell."""
    vision, layers, reading, cells = 0.0, 0.0, 0.0, 0
    for spec, job, _ in runner.admitted:
        entries = Store(store).run(job.key).journal.entries()
        times = [entry["record"]["times_ms"] for entry in entries if "record" in entry]
        row = next(row for row in runner.rows if row["run_key"] == job.key)
        answering = len(times) / row["extra"]["samples_per_second"] * 1e3
        phases = {
            name: sum(sample_times[name] for sample_times in times)
            for name in ("vision", "prefill", "decode")
        }
        vision += phases["vision"]
        reading += answering - sum(phases.values())
        layers += phases["prefill"] * _untouched(spec, row)
        cells += 1
    once = (cells - 1) / cells / 1e3
    return {"reading": reading * once, "vision": vision * once, "layers": layers * once}


def _untouched(spec: RunSpec, row: Mapping[str, Any]) -> float:
    """Return the share of a prefill's FLOPs before the first site."""
    facts = spec.model.facts
    method = method_of(spec.method)
    reducer = kind_of(method, spec).prompt_reducer(method)
    assert reducer is not None
    depth = facts.text.layers
    leaves = unreduced_layers(reducer.all_sites(facts.tower.layers, depth), depth)
    return min(1.0, leaves / depth / float(row["flops"]["share_of_full"]))


def page(result: Mapping[str, Any]) -> str:
    """Return the page that docs/ holds."""
    machine = result["conditions"]
    lines = [
        "# One pass against cell by cell",
        "",
        f"Written by `make bench-onepass`: torch {machine['torch']}, transformers {machine['transformers']}, "
        f"{machine['threads']} threads, load {machine['load_average']:.1f} at the end. Methods `{METHODS}` at ratios "
        f"`{RATIOS}`; the best of the turns of each way, model loaded, from checked cells to committed rows.",
        "",
        "| model | cells | samples | cell by cell s | one pass s | share | target | at best |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, entry in result["instances"].items():
        verdict = "" if entry["ratio"] <= entry["target"] else " missed"
        lines.append(
            f"| {name} | {entry['cells']} | {entry['limit']} | {min(entry['alone_s']):.1f} | "
            f"{min(entry['together_s']):.1f} | {entry['ratio']:.3f} | {entry['target']:g}{verdict} | "
            f"{entry['at_best']:.3f} |"
        )
    lines += ["", "Of the cell-by-cell time one pass can spare:", ""]
    for name, entry in result["instances"].items():
        total = min(entry["alone_s"])
        parts = ", ".join(
            f"{part} {spent / total:.1%}" for part, spent in entry["spared_s"].items()
        )
        lines.append(f"- {name}: {parts}. `{' '.join(entry['overrides'])}`")
    lines += [
        "",
        "`reading` is what answering takes beside the engine's phases: documents, chats, pixels and encoding; the "
        "journal's writes are in it and stay, so the bound is a little low. Decoding steps and shortened layers are "
        "each cell's own: batches of several cells would be padded, and their answers could differ in rounding.",
    ]
    return "\n".join(lines)


BENCH = Bench(
    "onepass_bench",
    measure,
    printed_page(page),
    page,
    {
        "--only": {"help": f"comma-separated: {', '.join(INSTANCES)}"},
        "--limit": {"type": int, "help": "samples per cell, instead of the instance's own"},
        "--turns": {"type": int, "default": 2, "help": "runs of each way"},
    },
    name="bench_onepass",
)
main = BENCH.main


if __name__ == "__main__":
    sys.exit(main())
