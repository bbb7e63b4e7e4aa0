"""Part of the engine benchmark: compares a shortened prefill with two bounds.

The FLOP bound assumes that all FLOPs cost the same. They do not: on a CPU, attention over thousands of tokens runs at a
fraction of the rate of matrix products, which also slow down when their operands exceed the cache. Methods drop the
expensive part, so a prefill may gain more than its share of FLOPs. The second bound is measured on the model:
single decoder layers, run separately at their input lengths, in the same rounds.

On a CPU, this module's hooks count the processor time of one thread, which excludes other processes and checks
the engine's timer. On a GPU, the engine's timer is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import process_time
from typing import TYPE_CHECKING, Any

import torch

from espalier.harness.cost.bounds import Gain, prefill_bound
from espalier.harness.cost.clock import Clock
from espalier.harness.cost.facts import Work
from espalier.harness.cost.flops import SampleFlops, layer_flops, sample_flops
from espalier.harness.engine.record import SampleRecord
from espalier.harness.stats import ratio_interval
from lab.bench.bench_page import one_thread
from lab.bench.bench_setup import Figure

if TYPE_CHECKING:
    from espalier.harness.models.adapter import Adapter

PART = "prefill"

#: Functions that answer once and return the telemetry.
Runs = Mapping[str, Callable[[], SampleRecord]]

#: Name of the run that drops nothing.
FULL = "full"


def prefill(adapter: Adapter, runs: Runs, repeats: int) -> list[Figure]:
    """Time the prefill of all runs in rounds and compare each gain over `full` with both bounds.

    Each run occurs once per round; the order is reversed every round, and an extra first round is not counted.
    """
    on_cpu = adapter.device.type == "cpu"
    threads: AbstractContextManager[None] = one_thread() if on_cpu else nullcontext()
    with threads:
        records = {name: run() for name, run in runs.items()}
        lengths = sorted({length for record in records.values() for length in _lengths(record)})
        timers: dict[Any, Callable[[], float]] = {
            **{name: _timed(adapter, run, on_cpu) for name, run in runs.items()},
            **{length: _layer(adapter, length, on_cpu) for length in lengths},
        }
        times = in_rounds(timers, repeats)
    figures: list[Figure] = []
    facts = adapter.facts
    for name, record in records.items():
        if name != FULL:
            work = Work(*record.work)
            counted = sample_flops(facts, record.entering, record.visual, record.text, work)
            figures += compared(name, record, counted, times)
    for length in lengths:
        rates = [layer_flops(facts.text, length) / ms / 1e6 for ms in times[length]]
        name = f"rate of a decoder layer by itself at {length} tokens"
        figures.append(Figure(PART, name, sorted(rates)[len(rates) // 2], "GFLOP/s"))
    return figures


def compared(
    name: str, record: SampleRecord, counted: SampleFlops, times: Mapping[Any, Sequence[float]]
) -> list[Figure]:
    """Return the gain of one run, both bounds, and the share reached of each.

    Args:
        name: name of the run.
        record: telemetry of the run.
        counted: FLOPs of the run.
        times: milliseconds, round by round, of each run by its name and of a single layer by its length.
    """
    rounds = range(len(times[name]))
    gain = Gain.of_pairs(times[FULL], times[name], prefill_bound([counted]))
    assert gain.bound is not None
    length = record.visual + record.text
    layers = [
        len(record.entering) * times[length][turn] / sum(times[n][turn] for n in _lengths(record))
        for turn in rounds
    ]
    gains = [times[FULL][turn] / times[name][turn] for turn in rounds]
    label = f"{name}, {record.visual} visual tokens"
    return [
        _figure(f"speed-up, {label}", gains),
        Figure(PART, f"speed-up that FLOPs allow, {label}", gain.bound, "x"),
        _figure(f"share of it reached, {label}", [gained / gain.bound for gained in gains], 0.9),
        _figure(f"speed-up that single layers allow, {label}", layers),
        _figure(
            f"share of that reached, {label}",
            [gained / allowed for gained, allowed in zip(gains, layers, strict=True)],
            0.9,
        ),
        Figure(PART, f"selection within it, {label}", record.times_ms["select"], "ms"),
    ]


def in_rounds(calls: Mapping[Any, Callable[[], float]], repeats: int) -> dict[Any, list[float]]:
    """Call each once per round, in reverse order every second round; return the results after a warm-up round."""
    results: dict[Any, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            value = calls[name]()
            if turn:
                results[name].append(value)
    return results


def _figure(name: str, values: Sequence[float], target: float | None = None) -> Figure:
    """Return the geometric mean over rounds with its 95 % interval; a share has `target` below and 1 above it."""
    mean = ratio_interval(values, [1.0] * len(values))
    interval = None if len(values) == 1 else (mean.low, mean.high)
    at_best = None if target is None else 1.0
    return Figure(PART, name, mean.value, "x", interval=interval, at_least=target, at_best=at_best)


def _lengths(record: SampleRecord) -> list[int]:
    """Return the tokens that entered each decoder layer."""
    return [visual + record.text for visual in record.entering]


def _timed(adapter: Adapter, run: Callable[[], SampleRecord], on_cpu: bool) -> Callable[[], float]:
    """Return a function that runs once and returns the milliseconds of its prefill, selection included."""

    def engine() -> float:
        return run().times_ms["prefill"]

    def processor() -> float:
        marks: list[float] = []
        # The decoder's own hooks run later, so they are inside the timed region.
        handles = [
            adapter.decoder.register_forward_pre_hook(lambda *_: marks.append(process_time())),
            adapter.decoder.register_forward_hook(lambda *_: marks.append(process_time())),
        ]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
        return (marks[1] - marks[0]) * 1e3

    return processor if on_cpu else engine


def _layer(adapter: Adapter, length: int, on_cpu: bool) -> Callable[[], float]:
    """Return a function that times the middle decoder layer on `length` tokens, in milliseconds."""
    decoder, facts = adapter.decoder, adapter.facts
    layer = decoder.layers[facts.text.layers // 2]
    hidden = torch.randn(
        1, length, facts.text.hidden, generator=torch.Generator().manual_seed(0)
    ).to(adapter.device, adapter.model.dtype)
    positions = torch.arange(length, device=adapter.device)[None]
    if facts.rotary_axes > 1:
        positions = positions.expand(facts.rotary_axes, 1, length)

    @torch.inference_mode()
    def once() -> float:
        rotary = decoder.rotary_emb(hidden, positions)
        clock = Clock(*adapter.devices, enabled=not on_cpu)
        started = process_time()
        with clock.phase("layer"):
            layer(hidden, attention_mask=None, position_embeddings=rotary)
        took = (process_time() - started) * 1e3
        return took if on_cpu else clock.totals_ms()["layer"]

    return once
