"""How much sooner a method answers than the unreduced model: both answer the same batches, in turns, in one process.

The pairs come after the run: its answers, its times and its peak of memory are those of a run without them. Neighbours
and clock speeds drift; two calls that follow each other drift together, and who is first changes from pair to pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lmms_eval.api.instance import Instance

from espalier.harness.cost.facts import ModelFacts
from espalier.harness.cost.speedup_bound import Gain, first_token_bound, prefill_bound
from espalier.harness.engine.record import Generated, Record
from espalier.harness.evaluation.batch_answers import key_of
from espalier.harness.evaluation.chat_model import ChatModel
from espalier.harness.kinds.kind import Generator, Rivals
from espalier.harness.kinds.sample_counts import flops_of
from espalier.harness.specs.generation import Settings
from espalier.harness.specs.run_spec import Auto, RunSpec

#: Share of the run's samples that `engine.paired=auto` spends, so that it costs under a tenth of the run: a sample of a
#: small batch costs more than one of the run's.
SHARE = 0.08

#: Samples that `auto` measures at most.
MOST = 32

#: Fewer pairs say little about their spread.
PAIRS = 4

#: Tokens of an answer that are decoded again: enough to time a step.
NEW_TOKENS = 8


@dataclass(frozen=True)
class Turns:
    """How many pairs, each of how many samples."""

    pairs: int
    rows: int


@dataclass(frozen=True)
class Paired:
    """What a row says: the speed-up, or None with the reason in `note`."""

    speedup: Mapping[str, Any] | None
    note: str


@dataclass(frozen=True)
class Turn:
    """What one side took for one batch: milliseconds a sample, of decoding a token (None if no step was made)."""

    prefill: float
    first_token: float
    per_token: float | None
    records: tuple[Record, ...]


def turns(
    asked: int | Auto, samples: int, batch_size: int, plain_over_own: float, processes: int = 1
) -> Turns | None:
    """Return how much is measured, by counts alone; None if `auto` cannot afford it.

    A pair, like the untimed one before the first, costs an answer of each side. In samples of the run that is
    1 + `plain_over_own`; `auto` spends `SHARE` of the run on them, and of `processes` one measures while others wait.

    Args:
        asked: samples to measure, or `auto`.
        samples: how many there are.
        batch_size: of the run; pairs are smaller where there would be too few of them.
        plain_over_own: cost of the unreduced model's prefill, tower included, over the method's.
        processes: of the run.
    """
    if asked != "auto":
        count = min(asked, samples)
        rows = max(min(batch_size, count // PAIRS), 1)
        return Turns(count // rows, rows)
    affordable = int(SHARE * samples / processes / (1 + plain_over_own))
    rows = min(batch_size, MOST // PAIRS, affordable // (PAIRS + 1))
    return Turns(min(affordable // rows - 1, MOST // rows), rows) if rows else None


def measured(spec: RunSpec, rivals: Rivals, model: ChatModel, processes: int = 1) -> Paired:
    """Return the speed-up that `engine.paired` asks for, of what the model has answered, or why there is none."""
    asked = spec.engine.paired
    if asked == 0:
        return Paired(None, "engine.paired=0")
    group, requests = model.answered()
    counted = flops_of(spec.model.facts, [one.record for one in model.samples.values()])
    planned = turns(asked, len(requests), model.batch_size, first_token_bound(counted), processes)
    if planned is None:
        return Paired(
            None,
            f"engine.paired=auto: a tenth of a run of {len(requests)} samples pays for no {PAIRS} pairs; "
            f"engine.paired={MOST} measures all the same",
        )
    facts, seed = spec.model.facts, spec.seed
    return measure(rivals, requests, group, model.encode, planned, facts, seed)


def measure(
    rivals: Rivals,
    requests: Sequence[Instance],
    group: Settings,
    encode: Callable[[Sequence[Instance]], Any],
    planned: Turns,
    facts: ModelFacts,
    seed: int = 0,
) -> Paired:
    """Let both sides answer batches spread evenly over the requests.

    Args:
        rivals: who answers.
        requests: at least `pairs` times `rows` of equal generation settings, all of which the run has answered.
        group: their settings; of each answer at most `NEW_TOKENS` are decoded.
        encode: makes a batch the model's inputs.
        planned: how many pairs of how many samples.
        facts: the model's, for the FLOPs of the same samples.
        seed: for answers that are sampled.
    """
    starts = [number * len(requests) // planned.pairs for number in range(planned.pairs)]
    blocks = [requests[start : start + planned.rows] for start in starts]
    own: list[Turn] = []
    plain: list[Turn] = []
    try:
        for number, block in enumerate([blocks[0], *blocks]):
            inputs = encode(block)
            names = ["/".join(map(str, key_of(request))) for request in block]
            sides = ((rivals.own, own), (rivals.plain, plain))
            for session, found in sides if number % 2 else sides[::-1]:
                found.append(_turn(session, inputs, names, group, seed))
    except Exception as error:
        # Where the reduced model fits, the whole one may not. The run has its answers; this is only left out.
        reason = next(iter(str(error).splitlines()), "")
        return Paired(
            None, f"the unreduced model failed beside it: {type(error).__name__}: {reason}"
        )
    return _compared(own[1:], plain[1:], planned, facts)  # the first pair warmed up


def _turn(
    session: Generator, inputs: Any, names: Sequence[str], group: Settings, seed: int
) -> Turn:
    longest = ("min_new_tokens", "min_length")
    settings = {name: value for name, value in group.generate.items() if name not in longest}
    settings["max_new_tokens"] = min(int(settings["max_new_tokens"]), NEW_TOKENS)
    with torch.random.fork_rng(enabled=bool(settings.get("do_sample"))):
        if settings.get("do_sample"):
            torch.manual_seed(seed)
        generated: Generated = session.generate(inputs, names, **settings)
    times = generated.records[0].times_ms
    return Turn(
        prefill=times["prefill"],
        first_token=times["vision"] + times["prefill"],
        per_token=times["decode_per_token"] if generated.ids.shape[1] > 1 else None,
        records=generated.records,
    )


def _compared(
    own: Sequence[Turn], plain: Sequence[Turn], planned: Turns, facts: ModelFacts
) -> Paired:
    counted = flops_of(facts, [record for turn in own for record in turn.records])
    prefill = Gain.of_pairs(
        [turn.prefill for turn in plain], [turn.prefill for turn in own], prefill_bound(counted)
    )
    first_token = Gain.of_pairs(
        [turn.first_token for turn in plain],
        [turn.first_token for turn in own],
        first_token_bound(counted),
    )
    steps = [
        (theirs.per_token, ours.per_token)
        for theirs, ours in zip(plain, own, strict=True)
        if theirs.per_token is not None and ours.per_token is not None
    ]
    decode = Gain.of_pairs([p for p, _ in steps], [o for _, o in steps]) if steps else None
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
    return Paired(block, note)
