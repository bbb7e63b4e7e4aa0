"""Part of the GPU benchmark for speculative decoding: complete answers, and single steps of large models.

Both sides run on one GPU in separate streams, and on two GPUs if there is a second one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from torch import Tensor

from espalier.harness.config.build_spec import specs_of
from espalier.harness.cost.bounds import copy_rate, step_bytes
from espalier.harness.decoding.speculative.cached_model import CachedModel
from espalier.harness.decoding.speculative.drafts import Draft, Row
from espalier.harness.decoding.speculative.forward_times import (
    DRAFTED,
    ROOM,
    WARMUP_ROUNDS,
    measure_forwards,
)
from espalier.harness.decoding.speculative.samplers import TokenSampler
from espalier.harness.decoding.speculative.state_machine import Meter, TimedRound, Transport
from espalier.harness.decoding.speculative.transports import SequentialTransport, ThreadTransport
from espalier.harness.engine.kv_cache import IndexedCache
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import load_adapter
from lab.bench import speculative_bench as bench_sd
from lab.bench.bench_setup import Figure, Setup
from lab.bench.gpu_setup import Found, GpuPlan, tried
from lab.bench.step_bandwidth import against_bandwidth


def decoding(plan: GpuPlan) -> Found:
    """Yield the figures of the embedded pair, then those of single steps of the large one."""
    yield from tried("answers", answers(plan))
    yield from tried("steps", steps(plan))


def places(plan: GpuPlan) -> dict[str, tuple[str, str]]:
    """Return the placements of drafts by description, each with its device and transport."""
    placements = {f"both on {plan.device}": (plan.device, "threads")}
    if plan.second is not None:
        placements[f"draft on {plan.second}"] = (plan.second, "processes")
    return placements


# ---------------------------------------------------------------------- whole answers


def answers(plan: GpuPlan) -> Found:
    """Yield times, speed-ups and faults of complete answers by the embedded pair."""
    few_do = plan.answers <= min(bench_sd.CAPTIONS[1], bench_sd.LONG[1])
    setup = Setup(quick=few_do, overrides=(f"model.device={plan.device}",))
    kinds = [kind for kind in bench_sd.kinds(setup) if kind.name in plan.kinds]
    for where, (device, transport) in places(plan).items():
        placement = (
            f"method.draft_options={{device: '{device}'}}",
            f"engine.transport={transport}",
        )
        for kind in kinds:
            few = replace(kind, chats=kind.chats[: bench_sd.WARMING + plan.answers])
            for setting in plan.decoders:
                words = " ".join(setting).replace("method.params.", "").replace("method=", "")
                name = f"{few.name}, {words}, {where}"
                yield from tried(name, of_decoder(name, setup, few, (*setting, *placement)))


def of_decoder(name: str, setup: Setup, kind: bench_sd.AnswerKind, setting: Sequence[str]) -> Found:
    """Yield the figures of one decoder's row: steps, overlap, bounded speed-ups, wrong answers."""
    block = bench_sd.row_of(setup, kind, setting)["extra"]["speculative"]
    for key, label, unit in (
        ("target_ms", "T_p", "ms"),
        ("draft_ms", "T_q", "ms"),
        ("c", "c", "x"),
        ("overlap_efficiency", "overlap efficiency", ""),
    ):
        if block[key] is not None:  # not defined for two streams of one GPU
            yield Figure("answers", f"{label}, {name}", block[key], unit)
    for key, label, bound in (
        ("speedup_decode", "decode speed-up", block["speedup_bound"]),
        ("speedup_end_to_end", "end-to-end speed-up", None),
    ):
        if block[key] is not None:
            interval = block[f"{key}_interval"]
            yield Figure(
                "answers", f"{label}, {name}", block[key], "x", interval=interval, at_best=bound
            )
    for key in ("mismatches", "degraded"):
        count = block[key]["answers"]
        label = "answers unlike plain ones" if key == "mismatches" else "answers given up"
        yield Figure("answers", f"{label}, {name}", count, "", at_most=0)


# ---------------------------------------------------------------------- single steps


@dataclass(frozen=True)
class FilledPair:
    """A target and a draft, with caches that can be filled to any length.

    Attributes:
        target: the large model.
        draft: the small one.
        lengths: visual tokens of each.
        name: name of the pair, for its figures.
    """

    target: Adapter
    draft: Adapter
    lengths: tuple[int, int]
    name: str

    def sides(self) -> tuple[CachedModel, CachedModel]:
        """Return both sides after prompts of random content."""
        return filled(self.target, self.lengths[0]), filled(self.draft, self.lengths[1])


def steps(plan: GpuPlan) -> Found:
    """Yield the times of single steps of the large pair, for each placement of the draft."""
    target = _loaded(plan.target, plan.device)
    rate = copy_rate(target.device, plan.copied)
    yield Figure("steps", "bandwidth of a copy, read and written", rate / 1e9, "GB/s")
    for where, (device, _) in places(plan).items():
        yield from tried(f"steps, {where}", of_draft(plan, target, device, where, rate))


def of_draft(plan: GpuPlan, target: Adapter, device: str, where: str, rate: float) -> Found:
    """Yield the steps of the target and of a draft on one device, which sees all visual tokens and then a few."""
    draft = _loaded(plan.draft, device)
    for draft_visual in (plan.visual, plan.visual - round(plan.ratio * plan.visual)):
        name = f"{plan.visual:,} visual tokens, {draft_visual:,} for the draft, {where}"
        pair = FilledPair(target, draft, (plan.visual, draft_visual), name)
        for way in WAYS:
            yield from way(pair, rate)


def alone_and_beside(pair: FilledPair, rate: float) -> Iterator[Figure]:
    """Yield steps of each side alone, with its bandwidth bound, and in parallel with the other."""
    adapters = pair.target, pair.draft
    sequential = RecordedTransport(
        SequentialTransport(*(Meter.of(adapter.devices) for adapter in adapters))
    )
    target, draft = pair.sides()
    by_itself = measure_forwards(draft, target, sequential, False, 0, TOKENS)
    times = {
        "target": (target, [timed.verifying.wall for timed in sequential.counted]),
        "draft": (draft, [timed.drafting.wall / DRAFTED for timed in sequential.counted]),
    }
    for role, (side, seconds) in times.items():
        n_bytes = step_bytes(side.adapter) + cached_bytes(side)
        ms = [1e3 * second for second in seconds]
        yield from against_bandwidth("steps", f"{role} alone, {pair.name}", ms, n_bytes, rate)
    yield Figure("steps", f"c alone, {pair.name}", by_itself.ratio, "x")
    target, draft = pair.sides()
    with ThreadTransport(pair.target.devices, pair.draft.devices) as threads:
        parallel = RecordedTransport(threads)
        at_once = measure_forwards(draft, target, parallel, True, 0, TOKENS)
    yield Figure("steps", f"T_p beside the draft, {pair.name}", 1e3 * at_once.target, "ms")
    yield Figure("steps", f"T_q beside the target, {pair.name}", 1e3 * at_once.draft, "ms")
    yield Figure("steps", f"c beside one another, {pair.name}", at_once.ratio, "x")
    name = f"one target step and {DRAFTED} drafted tokens, in turn over at once, {pair.name}"
    yield Figure("steps", name, sequential.seconds / parallel.seconds, "x")


#: Ways to run the steps of a pair; a new one, such as recorded graphs, is added as a function.
WAYS: Sequence[Callable[[FilledPair, float], Iterator[Figure]]] = (alone_and_beside,)

#: Token that answers of timed steps consist of.
TOKENS = (5, 6)


@dataclass
class RecordedTransport:
    """A transport that records every round."""

    transport: Transport
    rounds: list[TimedRound] = field(default_factory=list)

    @property
    def counted(self) -> list[TimedRound]:
        """The rounds after the warm-up."""
        return self.rounds[WARMUP_ROUNDS:]

    @property
    def seconds(self) -> float:
        """Median seconds of a round."""
        return median(timed.seconds for timed in self.counted)

    def in_turn(
        self, draft: Callable[[], Draft], rows: Callable[[Draft], Sequence[Row]]
    ) -> TimedRound:
        """Draft, then verify."""
        self.rounds.append(self.transport.in_turn(draft, rows))
        return self.rounds[-1]

    def at_once(self, draft: Callable[[], Draft], rows: Callable[[], Sequence[Row]]) -> TimedRound:
        """Draft and verify at the same time."""
        self.rounds.append(self.transport.at_once(draft, rows))
        return self.rounds[-1]

    def verify_only(self, rows: Callable[[], Sequence[Row]]) -> TimedRound:
        """Verify."""
        self.rounds.append(self.transport.verify_only(rows))
        return self.rounds[-1]


def cached_bytes(side: CachedModel) -> int:
    """Return the bytes of keys and values that a step reads, without unused space."""
    text, dtype = side.adapter.facts.text, side.adapter.model.dtype
    numbers = 2 * text.kv_heads * text.head_dim * sum(side.cache.lengths)
    return int(numbers * dtype.itemsize)


def filled(adapter: Adapter, length: int) -> CachedModel:
    """Return a side after a prompt of `length` tokens with random keys and values; tower and prefill do not run.

    The cost of a step depends only on the length of its cache, not on the content.
    """
    text, device = adapter.facts.text, adapter.device

    def prefill(cache: IndexedCache) -> tuple[Tensor, Tensor]:
        chance = torch.Generator(device).manual_seed(0)
        shape = (1, text.kv_heads, length, text.head_dim)
        for layer in range(text.layers):
            keys, values = (
                torch.randn(shape, generator=chance, device=device, dtype=adapter.model.dtype)
                for _ in range(2)
            )
            cache.update(keys, values, layer)
        axes = (1, 1) if adapter.facts.rotary_axes == 1 else (adapter.facts.rotary_axes, 1, 1)
        following = torch.full(axes, length, device=device)
        return torch.zeros(adapter.facts.vocabulary, device=device), following

    sampler = TokenSampler(torch.zeros(1, 1, dtype=torch.long, device=device))
    return CachedModel(adapter, sampler, ROOM + DRAFTED, prefill)


def _loaded(overrides: Sequence[str], device: str) -> Adapter:
    return load_adapter(specs_of(*overrides, f"model.device={device}")[0].model)
