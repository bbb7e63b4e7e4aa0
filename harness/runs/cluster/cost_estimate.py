"""What a cell would cost, by the model's facts alone: no weights are loaded, no sample is opened.

Counted is what a row calls `flops.prefill_exact`, the language model's prefill, times the samples; of a model that
denoises its answers, every step. Decoding is counted where the length of answers is stated: for each token of a
batch the weights are read once. The tower, loading and scoring are in nobody's count here; the assumed
rate of a GPU has to make up for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from espalier.harness.cost.budget import NOMINAL_TEXT
from espalier.harness.cost.flops import head_flops, text_flops
from espalier.harness.cost.schedule import frame_of
from espalier.harness.decoding.diffusion.denoising_settings import Denoising
from espalier.harness.decoding.diffusion.step_budgets import step_budgets
from espalier.harness.kinds.checks.length_check import decoder_bytes
from espalier.harness.kinds.lookup import as_token_reducer, in_front
from espalier.harness.specs.run_spec import RunSpec
from espalier.methods.base import Method, TokenReducer

#: What a GPU is assumed to do while it decodes: bytes of weights in a second, and the seconds that a token of a batch
#: takes at least, since launching its kernels takes as long.
BYTES_PER_SECOND = 1e12
LEAST_SECONDS = 0.02


@dataclass(frozen=True)
class Cost:
    """FLOPs of a cell.

    Attributes:
        flops: of all its samples.
        samples: how many it has.
        visual: visual tokens of one, before any reduction.
        text: its other tokens.
        decoding: seconds of all answers behind their prefill; None: nobody knows their length.
        longest: whether that length is the largest allowed, which answers may not reach.
    """

    flops: int
    samples: int
    visual: int
    text: int
    decoding: float | None = None
    longest: bool = False

    def seconds(self, flops_per_second: float) -> float:
        """Return the time that all that is counted takes on a GPU of this rate."""
        return self.flops / flops_per_second + (self.decoding or 0.0)


class Unknown(ValueError):
    """What a cell would cost cannot be told offline, and why."""


def cost_of(spec: RunSpec, method: Method) -> Cost:
    """Return what a cell costs.

    Raises:
        Unknown: its samples, their visual tokens or the steps of a denoised answer are not known before it runs.
        Refused: the method cannot reach the ratio on this model.
    """
    facts, samples = spec.model.facts, _samples(spec)
    if spec.benchmark.dataset.video:
        raise Unknown(f"benchmark {spec.benchmark.name}: lengths of its videos")
    visual = facts.visual_tokens
    asked = spec.benchmark.prompt_tokens
    text = NOMINAL_TEXT if asked is None else max(asked - visual, 0)
    if facts.diffusion is not None:
        return Cost(samples * _denoised(spec, method, text), samples, visual, text, 0.0)
    reducer = _reducer(spec, method)
    kept = spec.budget.keep(reducer, facts, visual, text)
    entering = frame_of(reducer, facts, visual, text).entering(kept)
    each = text_flops(facts, entering, text) + head_flops(facts)
    return Cost(samples * each, samples, visual, text, *_decoding(spec, samples))


def _decoding(spec: RunSpec, samples: int) -> tuple[float | None, bool]:
    """Return the seconds of all answers, and whether the length is a bound; None where no length is stated."""
    bound = spec.benchmark.generation.get("max_new_tokens")
    length = spec.benchmark.new_tokens or bound
    if length is None:
        return None, False
    size = spec.engine.batch_size
    batches = math.ceil(samples / (1 if size == "auto" else size))
    step = max(decoder_bytes(spec.model) / BYTES_PER_SECOND, LEAST_SECONDS)
    return batches * int(length) * step, spec.benchmark.new_tokens is None


def _denoised(spec: RunSpec, method: Method, text: int) -> int:
    """Return the FLOPs of all steps of one answer: each sees the whole prompt and every place of the answer."""
    facts, said = spec.model.facts, spec.benchmark.generation
    if said.get("max_new_tokens") is None or said.get("steps") is None:
        raise Unknown(
            f"model {spec.model.name}: steps of its answers come with the task (benchmark.generation.max_new_tokens "
            "and steps state them)"
        )
    how = Denoising.of(spec.generation)
    if how.prefix_cache:
        raise Unknown(f"model {spec.model.name}: steps behind a cached prompt")
    reducer = as_token_reducer(method) or _reducer(spec, method)
    places = text + how.length
    frame = frame_of(reducer, facts, facts.visual_tokens, places)
    budgets = step_budgets(reducer, spec.budget, facts, how.steps)
    steps = (
        frame.entering(budget.keep(reducer, facts, facts.visual_tokens, places))
        for budget in budgets
    )
    head = how.steps * head_flops(facts, how.length)
    return sum(text_flops(facts, entering, places) for entering in steps) + head


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
