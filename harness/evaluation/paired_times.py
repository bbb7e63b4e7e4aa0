"""Speed-up over the unreduced model: both sides answer the same batches, in turns, in one process.

The pairs come after the run, so that they do not affect its answers, times and peak memory. Load and clock speed of a
machine drift; two consecutive calls drift together, and the side that goes first alternates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lmms_eval.api.instance import Instance

from espalier.harness.cost.bounds import Gain, first_token_bound, prefill_bound
from espalier.harness.cost.facts import ModelFacts
from espalier.harness.engine.record import GeneratedBatch, SampleRecord
from espalier.harness.evaluation.batch_answers import key_of
from espalier.harness.evaluation.chat_model import ChatModel
from espalier.harness.kinds.kind import Generator, PairedSessions
from espalier.harness.kinds.sample_counts import flops_of
from espalier.harness.specs.generation import Settings
from espalier.harness.specs.run_spec import Auto, RunSpec

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


@dataclass(frozen=True)
class PairedAnswer:
    """Times of one side for one batch: milliseconds per sample, and per decoded token (None without a step)."""

    prefill: float
    first_token: float
    per_token: float | None
    records: tuple[SampleRecord, ...]


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
    facts, seed = spec.model.facts, spec.seed
    return measure(pair, requests, group, model.encode, planned, facts, seed)


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
    method_answers: list[PairedAnswer] = []
    plain_answers: list[PairedAnswer] = []
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
) -> PairedAnswer:
    lengths = ("min_new_tokens", "min_length", "thinking_budget")
    settings = {name: value for name, value in group.generate.items() if name not in lengths}
    settings["max_new_tokens"] = min(int(settings["max_new_tokens"]), NEW_TOKENS)
    with torch.random.fork_rng(enabled=bool(settings.get("do_sample"))):
        if settings.get("do_sample"):
            torch.manual_seed(seed)
        generated: GeneratedBatch = session.generate(inputs, names, **settings)
    times = generated.records[0].times_ms
    return PairedAnswer(
        prefill=times["prefill"],
        first_token=times["vision"] + times["prefill"],
        per_token=times["decode_per_token"] if generated.ids.shape[1] > 1 else None,
        records=generated.records,
    )


def _compared(
    method: Sequence[PairedAnswer],
    plain: Sequence[PairedAnswer],
    planned: PairPlan,
    facts: ModelFacts,
) -> PairedTimes:
    counted = flops_of(facts, [record for turn in method for record in turn.records])
    prefill = Gain.of_pairs(
        [turn.prefill for turn in plain], [turn.prefill for turn in method], prefill_bound(counted)
    )
    first_token = Gain.of_pairs(
        [turn.first_token for turn in plain],
        [turn.first_token for turn in method],
        first_token_bound(counted),
    )
    steps = [
        (plain_answer.per_token, method_answer.per_token)
        for plain_answer, method_answer in zip(plain, method, strict=True)
        if plain_answer.per_token is not None and method_answer.per_token is not None
    ]
    decode = (
        Gain.of_pairs([plain_step for plain_step, _ in steps], [own_step for _, own_step in steps])
        if steps
        else None
    )
    block = {
        "samples": planned.pairs * planned.rows,
        "pairs": planned.pairs,
        "batch_size": planned.rows,
        "prefill": prefill.entry(),
        "first_token": first_token.entry(),
        "decode_per_token": None if decode is None else decode.entry(),
        "bound": prefill.bound,
        "above_bound": prefill.above_bound or first_token.above_bound,
    }
    note = "times of the unreduced model over the method's, pair by pair on equal batches, in turns"
    return PairedTimes(block, note)
