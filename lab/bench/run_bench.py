"""Benchmark parts that run the model: machinery, batching, a complete benchmark, memory."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from espalier.harness.cost.memory import peak_memory, reset_resident_peak, resident_peak
from espalier.harness.evaluation.evaluate import evaluate
from espalier.harness.store import Store
from lab.bench.bench_setup import Figure, Setup, TimedPair, paired, reducer

if TYPE_CHECKING:
    from espalier.harness.evaluation.evaluate import Evaluation

GENERATION = {"do_sample": False, "max_new_tokens": 16}
MIB = 2**20


def machinery(setup: Setup) -> list[Figure]:
    """Time `generate` in a session at ratio 0 against the model's own, in turns on equal inputs.

    The target holds for the usual batch size. The overhead of a session hardly depends on
    the batch, so it is largest at batch 1; it is also given in milliseconds below each ratio.
    """
    # The engine takes two seconds to import, and not every part needs it.
    from espalier.harness.engine.session import Session

    figures = []
    model = setup.adapter.model
    usual = setup.spec().engine.batch_size
    assert usual != "auto"
    for rows in sorted({1, usual}):
        inputs = setup.inputs(rows)

        def plain(inputs: Mapping[str, torch.Tensor] = inputs) -> object:
            with torch.inference_mode():
                return model.generate(**inputs, **GENERATION)

        for name in ("none", "uniform", "uniform_layer2"):
            spec = setup.spec(f"method={name}", "ratio=0")
            method = reducer(spec)
            with Session(setup.adapter, method, spec.budget) as session:

                def through(
                    inputs: Mapping[str, torch.Tensor] = inputs, session: Session = session
                ) -> object:
                    return session.generate(inputs, None, **GENERATION)

                pair = paired(through, plain, setup.repeats(40, 20))
            where = ", ".join(site.where for site in method.sites(setup.adapter.facts.text.layers))
            label = f"{name} ({where or 'no site'}), batch {rows}"
            target = 1.02 if rows == usual else None
            figures.append(pair.figure("machinery", f"ratio 0 over plain, {label}", target))
            added = median(a - b for a, b in zip(pair.first, pair.second, strict=True))
            figures.append(Figure("machinery", f"added to one call, {label}", added * 1e3, "ms"))
    return figures


def batching(setup: Setup) -> list[Figure]:
    """Compare samples/s of an evaluation with batch 8 and with batch 1, in turns."""
    limit, turns = setup.repeats(64, 32), setup.repeats(5, 2)
    speeds: dict[int, list[float]] = {1: [], 8: []}
    for _ in range(turns):
        for rows, rates in speeds.items():
            speed = _evaluate(setup, "none", 0, limit, rows).samples_per_second
            assert speed is not None  # no answers from a journal here
            rates.append(speed)
    pair = TimedPair(tuple(speeds[8]), tuple(speeds[1]))
    each = [
        Figure("batching", f"samples/s, batch {rows}", median(rates), "/s")
        for rows, rates in speeds.items()
    ]
    return [*each, replace(pair.figure("batching", "batch 8 over batch 1"), at_least=2)]


def samples(setup: Setup) -> list[Figure]:
    """Time 500 samples of seedling_vqa with every token: the complete evaluation, with scoring."""
    limit = setup.repeats(500, 64)
    setup.adapter  # noqa: B018  loading is not timed
    started = perf_counter()
    done = _evaluate(setup, "none", 0, limit, 8)
    seconds = perf_counter() - started
    target = None if setup.quick else 90
    return [
        Figure("samples", f"{limit} samples of seedling_vqa", seconds, "s", at_most=target),
        Figure("samples", "of which answering", done.seconds, "s"),
    ]


def memory(setup: Setup) -> list[Figure]:
    """Measure an evaluation's peak memory and one sample's cache, with and without reduction."""
    limit = setup.repeats(64, 16)
    device = setup.spec().model.device
    setup.adapter  # noqa: B018  weights count as resident before the block
    reset_resident_peak()
    figures = [Figure("memory", "resident before, model loaded", resident_peak() / MIB, "MiB")]
    cache_bytes = {}
    for ratio in (0, 0.75):
        with peak_memory(device) as peak:
            done = _evaluate(setup, "uniform", ratio, limit, 8)
        cache_bytes[ratio] = fmean(sample.record.kv_bytes for sample in done.samples)
        name = f"ratio {ratio}, batch 8: {peak.note}"
        figures.append(Figure("memory", name, peak.bytes / MIB, "MiB"))
        figures.append(
            Figure(
                "memory", f"cache of one sample, ratio {ratio}", cache_bytes[ratio] / 1024, "KiB"
            )
        )
    return [
        *figures,
        Figure(
            "memory", "cache at ratio 0.75 over ratio 0", cache_bytes[0.75] / cache_bytes[0], "x"
        ),
    ]


def _evaluate(setup: Setup, method: str, ratio: float, limit: int, rows: int) -> Evaluation:
    """Evaluate seedling_vqa from scratch, in a temporary store."""
    with tempfile.TemporaryDirectory() as folder:
        spec = setup.spec(
            "benchmark=seedling_vqa",
            f"method={method}",
            f"ratio={ratio}",
            f"limit={limit}",
            f"engine.batch_size={rows}",
            "engine.paired=0",
            f"store={folder}",
        )
        journal = Store(Path(folder)).run("bench").journal
        return evaluate(spec, setup.adapter, reducer(spec), journal)
