"""Time and memory of the method and the unreduced model, in turns, on prompts that the harness composes.

The run's own answers are long and timed once; they give the scored throughput. Afterwards both sides answer one batch
again, a few tokens each, A B, B A, in one process, and are compared with the bound by memory bandwidth:

    bound of a step = (weights + cache) / measured rate of a copy,

with the cache in the middle of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch
from lmms_eval.api.instance import Instance
from lmms_eval.api.task import Task

from espalier.harness.cost.bounds import (
    Gain,
    copy_rate,
    first_token_bound,
    prefill_bound,
    step_bytes,
)
from espalier.harness.cost.facts import ModelFacts
from espalier.harness.cost.memory import peak_memory
from espalier.harness.engine.model_parts import ModelParts
from espalier.harness.engine.record import GeneratedBatch, SampleRecord
from espalier.harness.evaluation.batch_answers import key_of, ran_out
from espalier.harness.evaluation.chat_model import ChatModel
from espalier.harness.evaluation.samples import Sample
from espalier.harness.evaluation.synthetic_prompts import PromptComposition, compose_prompt, parts
from espalier.harness.kinds.kind import Generator, OpenMethod, PairedSessions
from espalier.harness.kinds.sample_counts import flops_of
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.generation import Settings
from espalier.harness.specs.run_spec import Auto, RunSpec
from espalier.harness.store.answer_digest import Key

#: Share of the run's samples that `engine.paired=auto` spends, so that it costs less than a tenth of the run: a sample
#: of a small batch costs more than one of the run.
SHARE = 0.08

#: Largest number of samples that `auto` measures.
MOST = 32

#: Smallest number of pairs: fewer do not show the spread.
PAIRS = 4

#: Tokens of an answer that are decoded: enough to time a step.
NEW_TOKENS = 8


@dataclass(frozen=True)
class PairPlan:
    """The number of pairs, and of samples in each."""

    pairs: int
    rows: int


@dataclass(frozen=True)
class PairedTimes:
    """The row's entry: the speed-up, or None with the reason in `note`."""

    speedup: Mapping[str, Any] | None
    note: str


def plan_pairs(
    paired: int | Auto, samples: int, batch_size: int, plain_over_own: float, processes: int = 1
) -> PairPlan | None:
    """Return the number of pairs to measure, from counts alone; None if `auto` cannot afford any.

    A pair, like the untimed one before the first, costs an answer of each side: 1 + `plain_over_own` in samples of the
    run. `auto` spends `SHARE` of the run on them; of several processes one measures while the others wait.

    Args:
        paired: samples to measure, or `auto`.
        samples: number of answered samples.
        batch_size: of the run; pairs are smaller if there would be too few of them.
        plain_over_own: cost of the unreduced model's prefill, tower included, over the method's.
        processes: number of the run's processes.
    """
    if paired != "auto":
        count = min(paired, samples)
        size = max(min(batch_size, count // PAIRS), 1)
        return PairPlan(count // size, size)
    affordable = int(SHARE * samples / processes / (1 + plain_over_own))
    size = min(batch_size, MOST // PAIRS, affordable // (PAIRS + 1))
    return PairPlan(min(affordable // size - 1, MOST // size), size) if size else None


def measure_run(
    spec: RunSpec, pair: PairedSessions, model: ChatModel, processes: int = 1
) -> PairedTimes:
    """Return the speed-up on answered requests that `engine.paired` requests, or why there is none."""
    paired = spec.engine.paired
    if paired == 0:
        return PairedTimes(None, "engine.paired=0")
    group, requests = model.answered()
    counted = flops_of(spec.model.facts, [sample.record for sample in model.samples.values()])
    planned = plan_pairs(
        paired, len(requests), model.batch_size, first_token_bound(counted), processes
    )
    if planned is None:
        return PairedTimes(
            None,
            f"engine.paired=auto: a tenth of a run of {len(requests)} samples pays for no {PAIRS} pairs; "
            f"engine.paired={MOST} measures all the same",
        )
    return measure(pair, requests, group, model.encode, planned, spec.model.facts, spec.seed)


def measure(
    pair: PairedSessions,
    requests: Sequence[Instance],
    group: Settings,
    encode: Callable[[Sequence[Instance]], Any],
    planned: PairPlan,
    facts: ModelFacts,
    seed: int = 0,
) -> PairedTimes:
    """Time both sides on batches spread evenly over the requests.

    Args:
        pair: the two sides.
        requests: at least `pairs` times `rows` answered requests with equal generation settings.
        group: their settings; at most `NEW_TOKENS` of each answer are decoded.
        encode: returns the model's inputs for a batch.
        planned: number and size of pairs.
        facts: the model's, for the FLOPs of the same samples.
        seed: seed of sampled answers.
    """
    starts = [number * len(requests) // planned.pairs for number in range(planned.pairs)]
    blocks = [requests[start : start + planned.rows] for start in starts]
    method_answers: list[GeneratedBatch] = []
    plain_answers: list[GeneratedBatch] = []
    try:
        for number, block in enumerate([blocks[0], *blocks]):
            inputs = encode(block)
            names = ["/".join(map(str, key_of(request))) for request in block]
            sides = ((pair.reduced, method_answers), (pair.plain, plain_answers))
            for session, answers in sides if number % 2 else sides[::-1]:
                answers.append(_turn(session, inputs, names, group, seed))
    except Exception as error:
        # The unreduced model may not fit where the reduced one does. The run has its answers.
        reason = next(iter(str(error).splitlines()), "")
        return PairedTimes(
            None, f"the unreduced model failed after the run: {type(error).__name__}: {reason}"
        )
    # The first pair warmed up.
    return _compared(method_answers[1:], plain_answers[1:], planned, facts)


def _turn(
    session: Generator, inputs: Any, names: Sequence[str], group: Settings, seed: int
) -> GeneratedBatch:
    lengths = ("min_new_tokens", "min_length", "thinking_budget")
    settings = {name: value for name, value in group.generate.items() if name not in lengths}
    settings["max_new_tokens"] = min(int(settings["max_new_tokens"]), NEW_TOKENS)
    with torch.random.fork_rng(enabled=bool(settings.get("do_sample"))):
        if settings.get("do_sample"):
            torch.manual_seed(seed)
        return session.generate(inputs, names, **settings)


def _phases(batch: GeneratedBatch) -> dict[str, float | None]:
    """Return milliseconds per sample of a batch, and per decoded token (None without a step)."""
    times = batch.records[0].times_ms
    return {
        "prefill": times["prefill"],
        "first_token": times["vision"] + times["prefill"],
        "decode_per_token": times["decode_per_token"] if batch.ids.shape[1] > 1 else None,
    }


def _compared(
    method: Sequence[GeneratedBatch],
    plain: Sequence[GeneratedBatch],
    planned: PairPlan,
    facts: ModelFacts,
) -> PairedTimes:
    counted = flops_of(facts, [record for batch in method for record in batch.records])
    bounds = {"prefill": prefill_bound(counted), "first_token": first_token_bound(counted)}
    pairs = [(_phases(first), _phases(second)) for first, second in zip(plain, method, strict=True)]
    gains_of: dict[str, Gain] = {}
    for phase in ("prefill", "first_token", "decode_per_token"):
        times = [
            (before, after)
            for before, after in ((first[phase], second[phase]) for first, second in pairs)
            if before is not None and after is not None
        ]
        if times:
            before_times, after_times = zip(*times, strict=True)
            gains_of[phase] = Gain.of_pairs(before_times, after_times, bounds.get(phase))
    prefill, decode = gains_of["prefill"], gains_of.get("decode_per_token")
    block = {
        "samples": planned.pairs * planned.rows,
        "pairs": planned.pairs,
        "batch_size": planned.rows,
        "prefill": prefill.entry(),
        "first_token": gains_of["first_token"].entry(),
        "decode_per_token": None if decode is None else decode.entry(),
        "bound": prefill.bound,
        "above_bound": prefill.above_bound or gains_of["first_token"].above_bound,
    }
    return PairedTimes(
        block,
        "times of the unreduced model over the method's, pair by pair on equal batches, in turns",
    )


#: Rounds that count, each with an answer of every side; one warm-up round precedes them.
ROUNDS = 3

#: Largest number of new tokens of an answer in a round.
TOKENS = 32

#: Bytes that are copied to measure the bandwidth: more than any processor cache.
COPIED = 2**28


@dataclass(frozen=True)
class LatencyRound:
    """One answer to a batch: milliseconds of the prefill and of a step for the whole batch, cache and peak in bytes."""

    prefill: float
    select: float
    step: float
    kv_bytes: int
    peak_bytes: int
    records: tuple[SampleRecord, ...]


@dataclass(frozen=True)
class StepReads:
    """Bytes that a decoding step reads.

    Attributes:
        weights: bytes of the decoder and the head.
        entry: bytes of keys and values that one token adds to the caches of all layers.
        rate: bytes per second of a copy.
    """

    weights: int
    entry: int
    rate: float

    @classmethod
    def of(cls, adapter: ModelParts) -> StepReads:
        """Measure the rate on the model's first device. Cost: a second, and 2 x COPIED bytes meanwhile."""
        entry = adapter.facts.text.entry_values * adapter.model.dtype.itemsize
        return cls(step_bytes(adapter), entry, copy_rate(adapter.device, COPIED))

    def bound(self, turn: LatencyRound, tokens: int) -> float:
        """Return the lower bound of a batch's step in milliseconds, averaged over an answer of `tokens`."""
        # Step k of tokens - 1 reads the prompt's entries and k new ones.
        cache = turn.kv_bytes + len(turn.records) * self.entry * tokens / 2
        return 1e3 * (self.weights + cache) / self.rate


def alternate(
    sides: Mapping[str, Generator],
    inputs: Any,
    names: Sequence[str],
    tokens: int,
    devices: Sequence[Any],
    rounds: int = ROUNDS,
    warmup: int = 1,
) -> dict[str, list[LatencyRound]]:
    """Return the rounds of each side without warm-up; the side that goes first alternates.

    Args:
        sides: generators by name.
        inputs: one encoded batch.
        names: an id for each row.
        tokens: exact number of new tokens of every answer.
        devices: devices that the peak memory is measured on.
        rounds: answers of each side that count.
        warmup: earlier answers that do not count.
    """
    rounds_of: dict[str, list[LatencyRound]] = {name: [] for name in sides}
    for number in range(warmup + rounds):
        order = list(sides) if number % 2 else list(sides)[::-1]
        for name in order:
            with peak_memory(*devices) as peak:
                generated = sides[name].generate(
                    inputs, names, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
                )
            rows, times = len(generated.records), generated.records[0].times_ms
            turn = LatencyRound(
                prefill=rows * times["prefill"],
                select=rows * times.get("select", 0.0),
                step=rows * times["decode_per_token"],
                kv_bytes=sum(record.kv_bytes for record in generated.records),
                peak_bytes=peak.bytes,
                records=generated.records,
            )
            rounds_of[name].append(turn)
    return {name: turns[warmup:] for name, turns in rounds_of.items()}


def side_summary(turns: Sequence[LatencyRound], reads: StepReads, tokens: int) -> dict[str, float]:
    """Return the row's entry about one side, medians over its rounds."""
    step, bound = median(turn.step for turn in turns), reads.bound(turns[0], tokens)
    return {
        "prefill_ms": median(turn.prefill for turn in turns),
        "select_ms": median(turn.select for turn in turns),
        "step_ms": step,
        "throughput": 1e3 * len(turns[0].records) / step,
        "kv_bytes": turns[0].kv_bytes,
        "peak_bytes": max(turn.peak_bytes for turn in turns),
        "bound_ms": bound,
        "bound_reached": bound / step,
    }


@dataclass
class LatencyRun:
    """A run over prompts that the harness composes.

    Args:
        benchmark: length of prompts and answers.
        seed: seed of the pixels.
        samples: the answered samples.
    """

    benchmark: BenchmarkSpec
    seed: int
    samples: Mapping[Key, Sample] = field(default_factory=dict)

    def compose(self, tasks: Sequence[Task], encode: Callable[[Any], Mapping[str, Any]]) -> None:
        """Set the composition of the tasks' prompts for this model."""
        assert self.benchmark.prompt_tokens is not None
        prompt = compose_prompt(
            lambda candidate: tokens_of(encode, candidate, self.seed), self.benchmark.prompt_tokens
        )
        for task in tasks:
            task.lmms_eval_specific_kwargs = {
                "before": prompt.before,
                "pictures": prompt.pictures,
                "behind": prompt.after,
                "seed": self.seed,
            }

    def take(self, samples: Mapping[Key, Sample]) -> None:
        """Keep the answers, which are scored by their times."""
        self.samples = samples

    def verdict(self, key: Key) -> list[str]:
        """Return the scorer's second result, as text: new tokens per second of the whole batch."""
        # A record has its row's share of a step of the batch, which makes one token for each row.
        per_second = 1e3 / self.samples[key].record.times_ms["decode_per_token"]
        return [json.dumps({"throughput": per_second})]

    def measure(self, model: ChatModel, opened: OpenMethod, adapter: ModelParts) -> dict[str, Any]:
        """Return the block `extra.latency` of a row; without paired sessions only the model itself is timed.

        Cost: ROUNDS + 1 answers of TOKENS tokens of each side.
        """
        pair = opened.paired
        group, requests = model.answered()
        block = requests[: model.batch_size]
        inputs, names = model.encode(block), [str(number) for number in range(len(block))]
        tokens = min(TOKENS, int(group.generate["max_new_tokens"]))
        reads = StepReads.of(adapter)
        sides: dict[str, Generator] = {"own": opened.generator if pair is None else pair.reduced}
        note = None if pair is not None else "nothing is removed: the run is the unreduced model's"
        if pair is not None:
            sides["plain"] = pair.plain
        try:
            rounds = alternate(sides, inputs, names, tokens, adapter.devices)
        except (RuntimeError, MemoryError) as error:
            # The unreduced model may not fit where the reduced one does. The run has its answers.
            if not ran_out(error) or "plain" not in sides:
                raise
            del sides["plain"]
            note = f"the unreduced model does not fit as well: {str(error).splitlines()[0]}"
            rounds = alternate(sides, inputs, names, tokens, adapter.devices)
        return {
            "prompt": prompt_block(rounds["own"][0].records, self.benchmark.prompt_tokens),
            "new_tokens": tokens,
            "batch_size": len(block),
            "rounds": ROUNDS,
            "weight_bytes": reads.weights,
            "copy_bytes_per_second": reads.rate,
            **{name: side_summary(rounds[name], reads, tokens) for name in sides},
            **({"gain": gains(rounds, reads, tokens)} if "plain" in rounds else {"plain": None}),
            "note": note,
        }


def prompt_block(records: Sequence[SampleRecord], tokens: int | None) -> dict[str, float | None]:
    """Return the requested and the actual prompt lengths, means over a batch."""
    visual, text = (
        fmean(getattr(record, name) for record in records) for name in ("visual", "text")
    )
    share = visual / (visual + text)
    return {"asked": tokens, "visual": visual, "text": text, "visual_share": share}


def gains(
    rounds: Mapping[str, Sequence[LatencyRound]], reads: StepReads, tokens: int
) -> dict[str, Any]:
    """Return the speed-ups of the method's phases over the unreduced model, round by round.

    The gain of a step is bounded by the ratio of the bytes that both sides read.
    """
    method, plain = rounds["own"], rounds["plain"]
    allowed = reads.bound(plain[0], tokens) / reads.bound(method[0], tokens)
    return {
        "prefill": Gain.of_pairs(
            [answer.prefill for answer in plain], [answer.prefill for answer in method]
        ).entry(),
        "step": Gain.of_pairs(
            [answer.step for answer in plain], [answer.step for answer in method], allowed
        ).entry(),
    }


def tokens_of(
    encode: Callable[[Any], Mapping[str, Any]], composition: PromptComposition, seed: int
) -> int:
    """Return the number of tokens of a prompt on a model; raises UserError if the model does not accept it."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts(composition, 0, seed)
    ]
    return int(encode([[{"role": "user", "content": content}]])["attention_mask"].sum())
