"""Sides of the benchmark of cache compression, with the time of scores and the memory of eviction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, Literal

from torch import Tensor

from espalier.harness.cost.bounds import Gain
from espalier.harness.cost.memory import DeviceMemory, reset_resident_peak, resident_peak
from espalier.harness.engine.eviction import CacheBudget
from espalier.harness.engine.layout import Stage
from espalier.harness.engine.record import GeneratedBatch
from espalier.harness.engine.session import Session
from espalier.harness.engine.session_setup import PassEviction
from espalier.harness.evaluation.latency import LatencyRound, StepReads, alternate, tokens_of
from espalier.harness.evaluation.synthetic_prompts import compose_prompt, parts
from espalier.harness.kinds.lookup import label_of
from espalier.harness.kinds.reducer import WHOLE
from espalier.harness.models.adapter import Adapter
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.run_spec import RunSpec
from espalier.methods.compressor import CacheCompressor
from espalier.methods.none import NoReduction

MS = 1e3

#: Purpose of a prompt length: decoding steps against their byte bound, or scores against the prefill.
Purpose = Literal["steps", "scores"]


@dataclass
class PassTimes:
    """Records of one pass: seconds of scores and of eviction, and peak bytes above the full cache."""

    scoring: float = 0.0
    evicting: float = 0.0
    above: int = 0


@dataclass
class WatchedEviction:
    """Implements PassEviction: wraps another one and measures time and peak memory."""

    inner: PassEviction
    noted: PassTimes

    @property
    def held_visual(self) -> Sequence[Sequence[int]]:
        """Visual entries of the wrapped eviction."""
        return self.inner.held_visual

    @property
    def held_special(self) -> Sequence[Sequence[int]]:
        """Newline and separator entries of the wrapped eviction."""
        return self.inner.held_special

    def score_layer(self, layer: int, query: Tensor, key: Tensor, scaling: float) -> None:
        """Score a layer."""
        started = perf_counter()
        self.inner.score_layer(layer, query, key, scaling)
        self.noted.scoring += perf_counter() - started

    def shorten(self, cache: Any) -> list[Stage]:
        """Evict."""
        reset_resident_peak()
        before, started = DeviceMemory("cpu").used(), perf_counter()
        stages = self.inner.shorten(cache)
        self.noted.evicting = perf_counter() - started
        self.noted.above = max(resident_peak() - before, 0)
        return stages


@dataclass(frozen=True)
class RecordingEvictor:
    """Implements CacheEvictor: a compressor with its budget, recording every pass."""

    budget: CacheBudget
    passes: list[PassTimes] = field(default_factory=list)

    @property
    def acts(self) -> bool:
        """Whether the budget evicts anything."""
        return self.budget.acts

    def begin(self, prefill: Any, depth: int) -> WatchedEviction:
        """Begin a pass."""
        self.passes.append(PassTimes())
        return WatchedEviction(self.budget.begin(prefill, depth), self.passes[-1])


@dataclass(frozen=True)
class CacheSide:
    """A model with the full or a compressed cache. Implements Generator."""

    name: str
    ratio: float
    adapter: Adapter
    watched: RecordingEvictor | None

    @classmethod
    def of(cls, adapter: Adapter, spec: RunSpec) -> CacheSide:
        """Return the side of a run."""
        method = build_method(spec.method.name, spec.method.params)
        if not isinstance(method, CacheCompressor):
            return cls("whole cache", 0.0, adapter, None)
        name = " ".join(filter(None, (spec.method.name, label_of(spec))))
        ratio = spec.budget.ratio
        return cls(name, ratio, adapter, RecordingEvictor(CacheBudget(method, ratio)))

    def generate(
        self, inputs: Mapping[str, Any], samples: Sequence[str], **generation: Any
    ) -> GeneratedBatch:
        """Answer in a new session."""
        with Session(self.adapter, NoReduction(), WHOLE, evicting=self.watched) as session:
            return session.generate(inputs, samples, **generation)


@dataclass(frozen=True)
class CacheRow:
    """Times of one side at one length, medians over its turns.

    Attributes:
        tokens, visual: all and visual tokens of the prompt.
        name, ratio: name and ratio of the side.
        prefill_ms, scoring_ms, evicting_ms, step_ms: of one prompt, all scores, all evictions, one token.
        kv_bytes: bytes of the cache after the prefill.
        visual_share: share of visual entries that it holds.
        above_bytes: peak bytes above the full cache while evicting.
        allowed: bound of a step's gain from bytes.
        gain: measured gain over the full cache, geometric mean over the rounds with its 95 % interval.
        weights, rate: bytes of weights that a step reads; bytes per second of a copy.
        bound_ms: lower bound of a step from these.
        instance: model overrides.
        purpose: of the measurement.
    """

    tokens: int
    visual: int
    name: str
    ratio: float
    prefill_ms: float
    scoring_ms: float
    evicting_ms: float
    step_ms: float
    kv_bytes: int
    visual_share: float
    above_bytes: int
    allowed: float
    gain: Gain
    weights: int
    rate: float
    bound_ms: float
    instance: str = ""
    purpose: Purpose = "steps"

    @property
    def scoring_share(self) -> float:
        """Time of scores over that of the prefill without them."""
        return self.scoring_ms / (self.prefill_ms - self.scoring_ms)

    @property
    def reached(self) -> float:
        """Measured gain over allowed gain."""
        return self.gain.ratio / self.allowed

    def entry(self) -> dict[str, Any]:
        """Return the JSON form."""
        entry = asdict(self)
        entry["asked"] = entry.pop("purpose")  # the last field, so the order stays
        return {**entry, "scoring_share": self.scoring_share, "reached": self.reached}


def rows_of(
    adapter: Adapter,
    sides: Sequence[CacheSide],
    tokens: int,
    rounds: int,
    warmup: int,
    new_tokens: int,
) -> list[CacheRow]:
    """Answer one prompt with all sides in turns; the first has the full cache."""
    composed = compose_prompt(lambda prompt: tokens_of(adapter.encode, prompt, 0), tokens)
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts(composed, 0, 0)
    ]
    inputs = adapter.encode([[{"role": "user", "content": content}]])
    keyed = {f"{side.name} {side.ratio:g}": side for side in sides}
    turns = alternate(keyed, inputs, ["0"], new_tokens, adapter.devices, rounds, warmup)
    reads = StepReads.of(adapter)
    full_turns = turns[next(iter(keyed))]
    return [
        _row(side, turns[key], full_turns, reads, rounds, new_tokens) for key, side in keyed.items()
    ]


def _row(
    side: CacheSide,
    turns: Sequence[LatencyRound],
    full_turns: Sequence[LatencyRound],
    reads: StepReads,
    rounds: int,
    new_tokens: int,
) -> CacheRow:
    record = turns[0].records[0]
    noted = [PassTimes()] if side.watched is None else side.watched.passes[-rounds:]
    return CacheRow(
        tokens=record.visual + record.text,
        visual=record.visual,
        name=side.name,
        ratio=side.ratio,
        prefill_ms=median(turn.prefill for turn in turns),
        scoring_ms=MS * median(times.scoring for times in noted),
        evicting_ms=MS * median(times.evicting for times in noted),
        step_ms=median(turn.step for turn in turns),
        kv_bytes=turns[0].kv_bytes,
        visual_share=record.kv_entries / sum(record.entering),
        above_bytes=max(times.above for times in noted),
        allowed=reads.bound(full_turns[0], new_tokens) / reads.bound(turns[0], new_tokens),
        gain=Gain.of_pairs([turn.step for turn in full_turns], [turn.step for turn in turns]),
        weights=reads.weights,
        rate=reads.rate,
        bound_ms=reads.bound(turns[0], new_tokens),
    )
