"""What a cell would cost, by the model's facts alone: no weights are loaded, no sample is opened.

Counted is what a row calls `flops.prefill_exact`, the language model's prefill, times the samples. The tower, decoding,
loading and scoring are in nobody's count here; the assumed rate of a GPU has to make up for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.budget import NOMINAL_TEXT
from harness.kinds.lookup import in_front
from harness.measure.flops import head_flops, text_flops
from harness.measure.schedule import frame_of
from harness.specs import RunSpec
from methods.base import Method, TokenReducer


@dataclass(frozen=True)
class Cost:
    """FLOPs of a cell.

    Attributes:
        flops: of all its samples.
        samples: how many it has.
        visual: visual tokens of one, before any reduction.
        text: its other tokens.
    """

    flops: int
    samples: int
    visual: int
    text: int


class Unknown(ValueError):
    """What a cell would cost cannot be told offline, and why."""


def cost_of(spec: RunSpec, method: Method) -> Cost:
    """Return what a cell costs.

    Raises:
        Unknown: its samples, their visual tokens or the steps of an answer are not known before it runs.
        Refused: the method cannot reach the ratio on this model.
    """
    facts, samples = spec.model.facts, _samples(spec)
    if facts.diffusion is not None:
        raise Unknown(f"model {spec.model.name}: steps of its answers come with the task")
    if spec.benchmark.dataset.video:
        raise Unknown(f"benchmark {spec.benchmark.name}: lengths of its videos")
    reducer, visual = _reducer(spec, method), facts.visual_tokens
    asked = spec.benchmark.prompt_tokens
    text = NOMINAL_TEXT if asked is None else max(asked - visual, 0)
    kept = spec.budget.keep(reducer, facts, visual, text)
    entering = frame_of(reducer, facts, visual, text).entering(kept)
    one = text_flops(facts, entering, text) + head_flops(facts)
    return Cost(samples * one, samples, visual, text)


def _samples(spec: RunSpec) -> int:
    known = (spec.benchmark.limit, spec.benchmark.dataset.samples)
    counts = [count for count in known if count is not None]
    if not counts:
        raise Unknown(f"benchmark {spec.benchmark.name}: number of its samples")
    return min(counts)


def _reducer(spec: RunSpec, method: Method) -> TokenReducer:
    """Return what shortens the prefill; a method that evicts behind it leaves it whole."""
    reducer = in_front(method)
    if reducer is not None:
        return reducer
    raise Unknown(f"method {spec.method.name}: rounds of its draft")
