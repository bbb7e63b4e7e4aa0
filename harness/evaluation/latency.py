"""Time and memory of prompts that the harness composes, the method's and the unreduced model's, in turns.

The run's own answers are long and timed once, which gives the throughput that is scored. Behind it both sides answer
one batch again, a few tokens each, A B, B A, in one process, and stand beside what the bandwidth of the memory allows:

    bound of a step = (weights + cache) / measured rate of a copy,

the cache as it is in the middle of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from lmms_eval.api.task import Task

from espalier.harness.cost.decode_bound import copy_rate, step_bytes
from espalier.harness.cost.peak_memory import peak_memory
from espalier.harness.cost.speedup_bound import Gain
from espalier.harness.engine.model_parts import Parts
from espalier.harness.engine.record import Record
from espalier.harness.evaluation.auto_batch import ran_out
from espalier.harness.evaluation.chat_model import ChatModel
from espalier.harness.evaluation.samples import Key, Sample
from espalier.harness.evaluation.synthetic_prompts import Composition, composed, parts
from espalier.harness.kinds.kind import Generator, PairedSessions, Responder
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.generation import Settings

#: Rounds that count, each with an answer of every side; one more comes before and warms up.
ROUNDS = 3

#: New tokens of an answer in a round, at most.
TOKENS = 32

#: Bytes that are copied to measure the bandwidth: beyond any cache of a processor.
COPIED = 2**28


@dataclass(frozen=True)
class Turn:
    """One batch answered once, whole batch: milliseconds of the prefill and of a step, cache and peak in bytes."""

    prefill: float
    select: float
    step: float
    kv_bytes: int
    peak_bytes: int
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Reads:
    """What a step of decoding reads.

    Attributes:
        weights: bytes of the decoder and the head.
        entry: bytes of keys and values that one token adds to the caches of all layers.
        rate: bytes a second, of a copy.
    """

    weights: int
    entry: int
    rate: float

    @classmethod
    def of(cls, adapter: Parts) -> Reads:
        """Measure the rate on the model's first device. Cost: a second, and 2 x COPIED bytes meanwhile."""
        text = adapter.facts.text
        entry = 2 * text.layers * text.kv_heads * text.head_dim * adapter.model.dtype.itemsize
        return cls(step_bytes(adapter), entry, copy_rate(adapter.device, COPIED))

    def bound(self, turn: Turn, tokens: int) -> float:
        """Return the milliseconds below which no step of a batch can be, mean over an answer of `tokens`."""
        # Step k of tokens - 1 reads the prompt's entries and k new ones.
        cache = turn.kv_bytes + len(turn.records) * self.entry * tokens / 2
        return 1e3 * (self.weights + cache) / self.rate


def in_turns(
    sides: Mapping[str, Generator],
    inputs: Any,
    names: Sequence[str],
    tokens: int,
    devices: Sequence[Any],
    rounds: int = ROUNDS,
    warmup: int = 1,
) -> dict[str, list[Turn]]:
    """Return the turns of each side, its warm-up left out; who is first changes from round to round.

    Args:
        sides: who answers.
        inputs: one encoded batch.
        names: an id for each row.
        tokens: new tokens of every answer, no end before.
        devices: whose memory counts.
        rounds: answers of each side that count.
        warmup: those before them that do not.
    """
    found: dict[str, list[Turn]] = {name: [] for name in sides}
    for number in range(warmup + rounds):
        order = list(sides) if number % 2 else list(sides)[::-1]
        for name in order:
            with peak_memory(*devices) as peak:
                done = sides[name].generate(
                    inputs, names, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
                )
            rows, times = len(done.records), done.records[0].times_ms
            turn = Turn(
                prefill=rows * times["prefill"],
                select=rows * times.get("select", 0.0),
                step=rows * times["decode_per_token"],
                kv_bytes=sum(record.kv_bytes for record in done.records),
                peak_bytes=0,
                records=done.records,
            )
            found[name].append(replace(turn, peak_bytes=peak.bytes))
    return {name: turns[warmup:] for name, turns in found.items()}


def told(turns: Sequence[Turn], reads: Reads, tokens: int) -> dict[str, float]:
    """Return what a row says of one side, medians over its turns."""
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
class Clocked:
    """One run over prompts that the harness composes.

    Args:
        benchmark: length of prompts and answers.
        seed: of the pixels.
        samples: what has been answered.
    """

    benchmark: BenchmarkSpec
    seed: int
    samples: Mapping[Key, Sample] = field(default_factory=dict)

    def compose(self, tasks: Sequence[Task], encode: Callable[[Any], Mapping[str, Any]]) -> None:
        """Tell the tasks of what their prompts are made on this model."""
        assert self.benchmark.prompt_tokens is not None
        made = composed(lambda one: tokens_of(encode, one, self.seed), self.benchmark.prompt_tokens)
        settings = {"before": made.before, "pictures": made.pictures, "behind": made.behind}
        for task in tasks:
            task.lmms_eval_specific_kwargs = {**settings, "seed": self.seed}

    def take(self, samples: Mapping[Key, Sample]) -> None:
        """Keep the answers, which the clock scores."""
        self.samples = samples

    def verdict(self, key: Key) -> list[str]:
        """Return what a scorer gets beside the answer, as text: new tokens of its whole batch a second."""
        # A record has its row's share of a step of the batch, which makes one token of each row.
        per_second = 1e3 / self.samples[key].record.times_ms["decode_per_token"]
        return [json.dumps({"throughput": per_second})]

    def measure(
        self, model: ChatModel, own: Responder, rivals: PairedSessions | None, adapter: Parts
    ) -> dict[str, Any]:
        """Return the block `extra.latency` of a row; without rivals the model stands alone.

        Cost: ROUNDS + 1 answers of TOKENS tokens of each side.
        """
        group, requests = model.answered()
        block = requests[: model.batch_size]
        inputs, names = model.encode(block), [str(number) for number in range(len(block))]
        tokens = min(TOKENS, _new_tokens(group))
        reads = Reads.of(adapter)
        sides: dict[str, Generator] = {"own": own if rivals is None else rivals.own}
        note = (
            None if rivals is not None else "nothing is removed: the run is the unreduced model's"
        )
        if rivals is not None:
            sides["plain"] = rivals.plain
        try:
            found = in_turns(sides, inputs, names, tokens, adapter.devices)
        except (RuntimeError, MemoryError) as error:
            # Where the reduced model fits, the whole one may not. The run has its answers.
            if not ran_out(error) or "plain" not in sides:
                raise
            del sides["plain"]
            note = f"the unreduced model does not fit beside it: {str(error).splitlines()[0]}"
            found = in_turns(sides, inputs, names, tokens, adapter.devices)
        return {
            "prompt": prompt_block(found["own"][0].records, self.benchmark.prompt_tokens),
            "new_tokens": tokens,
            "batch_size": len(block),
            "rounds": ROUNDS,
            "weight_bytes": reads.weights,
            "copy_bytes_per_second": reads.rate,
            **{name: told(found[name], reads, tokens) for name in sides},
            **({"gain": gains(found, reads, tokens)} if "plain" in found else {"plain": None}),
            "note": note,
        }


def prompt_block(records: Sequence[Record], asked: int | None) -> dict[str, float | None]:
    """Return the length that was asked for and those that came about, means over a batch."""
    visual, text = (fmean(getattr(one, name) for one in records) for name in ("visual", "text"))
    share = visual / (visual + text)
    return {"asked": asked, "visual": visual, "text": text, "visual_share": share}


def gains(found: Mapping[str, Sequence[Turn]], reads: Reads, tokens: int) -> dict[str, Any]:
    """Return how many times as fast the method's phases are as the unreduced model's, turn by turn.

    The gain of a step stands beside what the bytes of both sides allow.
    """
    own, plain = found["own"], found["plain"]
    allowed = reads.bound(plain[0], tokens) / reads.bound(own[0], tokens)
    return {
        "prefill": Gain.of_pairs(
            [one.prefill for one in plain], [one.prefill for one in own]
        ).entry(),
        "step": Gain.of_pairs(
            [one.step for one in plain], [one.step for one in own], allowed
        ).entry(),
    }


def tokens_of(
    encode: Callable[[Any], Mapping[str, Any]], composition: Composition, seed: int
) -> int:
    """Return the tokens that a model reads of a prompt; raises UserError where it does not take it."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts(composition, 0, seed)
    ]
    return int(encode([[{"role": "user", "content": content}]])["attention_mask"].sum())


def _new_tokens(group: Settings) -> int:
    return int(group.generate["max_new_tokens"])
