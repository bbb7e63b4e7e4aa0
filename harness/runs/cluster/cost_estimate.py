"""Estimated cost of a cell, by the model's facts alone: no weights are loaded, no sample is opened.

Counted are the FLOPs of a row's `flops.prefill_exact`, the language model's prefill, times the samples; for a model
that denoises its answers, every step. Decoding is counted if the length of answers is stated: for each token of a batch
the weights are read once. The tower, loading and scoring are not counted; the assumed rate of a GPU has to compensate
for them.
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
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.specs.run_spec import RunSpec
from espalier.methods.base import Method, TokenReducer

#: Assumed decoding speed of a GPU: bytes of weights per second, and minimum seconds per token of a batch, the time to
#: launch its kernels.
BYTES_PER_SECOND = 1e12
MIN_SECONDS = 0.02


@dataclass(frozen=True)
class CellCost:
    """FLOPs of a cell.

    Attributes:
        flops: of all its samples.
        samples: their number.
        visual: visual tokens of one sample, before any reduction.
        text: its other tokens.
        decoding: seconds of all answers after their prefill; None: their length is unknown.
        longest: whether that length is the largest allowed, which answers may not reach.
    """

    flops: int
    samples: int
    visual: int
    text: int
    decoding: float | None = None
    longest: bool = False

    def seconds(self, flops_per_second: float) -> float:
        """Return the time of all counted work on a GPU of this rate."""
        return self.flops / flops_per_second + (self.decoding or 0.0)


class UnknownCost(ValueError):
    """The reason why the cost of a cell cannot be estimated offline."""


def cost_of(spec: RunSpec, method: Method) -> CellCost:
    """Return the estimated cost of a cell.

    Raises:
        UnknownCost: its samples, their visual tokens or the steps of a denoised answer are not known before it runs.
        Refused: the method cannot reach the ratio on this model.
    """
    facts, samples = spec.model.facts, _samples(spec)
    if spec.benchmark.dataset.video:
        raise UnknownCost(f"benchmark {spec.benchmark.name}: lengths of its videos")
    visual = facts.visual_tokens
    stated = spec.benchmark.prompt_tokens
    text = NOMINAL_TEXT if stated is None else max(stated - visual, 0)
    if facts.diffusion is not None:
        return CellCost(samples * _denoising_flops(spec, method, text), samples, visual, text, 0.0)
    reducer = _reducer(spec, method)
    kept = spec.budget.keep(reducer, facts, visual, text)
    entering = frame_of(reducer, facts, visual, text).entering(kept)
    each = text_flops(facts, entering, text) + head_flops(facts)
    return CellCost(samples * each, samples, visual, text, *_decoding(spec, samples))


def _decoding(spec: RunSpec, samples: int) -> tuple[float | None, bool]:
    """Return the seconds of all answers, and whether the length is a bound; None where no length is stated."""
    bound = spec.benchmark.generation.get("max_new_tokens")
    length = spec.benchmark.new_tokens or bound
    if length is None:
        return None, False
    size = spec.engine.batch_size
    batches = math.ceil(samples / (1 if size == "auto" else size))
    step = max(decoder_bytes(spec.model) / BYTES_PER_SECOND, MIN_SECONDS)
    return batches * int(length) * step, spec.benchmark.new_tokens is None


def _denoising_flops(spec: RunSpec, method: Method, text: int) -> int:
    """Return the FLOPs of all steps of one answer: each processes the whole prompt and every place of the answer."""
    facts, generation = spec.model.facts, spec.benchmark.generation
    if generation.get("max_new_tokens") is None or generation.get("steps") is None:
        raise UnknownCost(
            f"model {spec.model.name}: steps of its answers come with the task (benchmark.generation.max_new_tokens "
            "and steps state them)"
        )
    settings = Denoising.of(spec.generation)
    if settings.prefix_cache:
        raise UnknownCost(f"model {spec.model.name}: steps behind a cached prompt")
    reducer = method if isinstance(method, TokenReducer) else _reducer(spec, method)
    places = text + settings.length
    frame = frame_of(reducer, facts, facts.visual_tokens, places)
    budgets = step_budgets(reducer, spec.budget, facts, settings.steps)
    steps = (
        frame.entering(budget.keep(reducer, facts, facts.visual_tokens, places))
        for budget in budgets
    )
    head = settings.steps * head_flops(facts, settings.length)
    return sum(text_flops(facts, entering, places) for entering in steps) + head


def _samples(spec: RunSpec) -> int:
    limits = (spec.benchmark.limit, spec.benchmark.dataset.samples)
    counts = [count for count in limits if count is not None]
    if not counts:
        raise UnknownCost(f"benchmark {spec.benchmark.name}: number of its samples")
    return min(counts)


def _reducer(spec: RunSpec, method: Method) -> TokenReducer:
    """Return the reducer of the prefill; a method that evicts after it leaves it unreduced."""
    reducer = kind_of(method, spec).prompt_reducer(method)
    if reducer is not None:
        return reducer
    raise UnknownCost(f"method {spec.method.name}: rounds of its draft")
