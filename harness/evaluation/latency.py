"""Time and memory of the method and the unreduced model, in turns, on prompts that the harness composes.

The run's own answers are long and timed once; they give the scored throughput. Afterwards both sides answer one batch
again, a few tokens each, A B, B A, in one process, and are compared with the bound by memory bandwidth:

    bound of a step = (weights + cache) / measured rate of a copy,

with the cache in the middle of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from lmms_eval.api.task import Task

from espalier.harness.cost.bounds import Gain, copy_rate, step_bytes
from espalier.harness.cost.memory import peak_memory
from espalier.harness.engine.model_parts import ModelParts
from espalier.harness.engine.record import SampleRecord
from espalier.harness.evaluation.auto_batch import ran_out
from espalier.harness.evaluation.chat_model import ChatModel
from espalier.harness.evaluation.samples import Key, Sample
from espalier.harness.evaluation.synthetic_prompts import PromptComposition, compose_prompt, parts
from espalier.harness.kinds.kind import Generator, OpenMethod
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.generation import Settings

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
                peak_bytes=0,
                records=generated.records,
            )
            rounds_of[name].append(replace(turn, peak_bytes=peak.bytes))
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
        settings = {"before": prompt.before, "pictures": prompt.pictures, "behind": prompt.after}
        for task in tasks:
            task.lmms_eval_specific_kwargs = {**settings, "seed": self.seed}

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
        tokens = min(TOKENS, _new_tokens(group))
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


def _new_tokens(group: Settings) -> int:
    return int(group.generate["max_new_tokens"])
