"""Estimated cost of a cell and of a job, by the model's facts alone: no weights are loaded, no sample is opened.

Counted are the FLOPs of a row's `flops.prefill_exact`, the language model's prefill, times the samples; for a model
that denoises its answers, every step; the vision tower, on a picture of nominal size; and decoding, if the length of
answers is known (conf/answer_lengths.yaml): each token of a batch reads the weights and the cache once. A job also
starts and loads its weights. Scoring, judges and the preparation of pictures are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from statistics import fmean
from typing import Any

from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.cost.budget import NOMINAL_TEXT, frame_of
from espalier.harness.cost.facts import ModelFacts
from espalier.harness.cost.flops import (
    cached_prompt_flops,
    head_flops,
    projector_flops,
    text_flops,
    tower_flops,
)
from espalier.harness.decoding.diffusion.answer_flops import answer_flops, canvas_of
from espalier.harness.decoding.diffusion.denoising_settings import Denoising
from espalier.harness.decoding.diffusion.step_budgets import step_budgets
from espalier.harness.kinds.checkpoint_check import decoder_bytes, entry_bytes
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.paths import CONF
from espalier.harness.runs.cluster.gpu_kinds import GpuKind, Span, reached
from espalier.harness.runs.cluster.resources import gpus_for, models_of, weight_bytes
from espalier.harness.settings import Count, Names, SomeNames, Text, read_section
from espalier.harness.specs.generation import CanvasSettings
from espalier.harness.specs.run_spec import RunSpec
from espalier.methods.base import Method, TokenReducer

ANSWER_LENGTHS = CONF / "answer_lengths.yaml"


@dataclass(frozen=True)
class Decoding:
    """Answers that are generated token by token.

    Attributes:
        tokens: of one answer.
        batches: of samples that are answered together.
        weights: bytes of weights that a step reads.
        prompt: bytes of cache that a step reads of a batch's prompts.
        entry: bytes of cache of a batch's new tokens, one each.
    """

    tokens: Span
    batches: int
    weights: int
    prompt: int
    entry: int

    def step_bytes(self, tokens: float) -> float:
        """Return the bytes that a step reads, a mean over `tokens` steps."""
        return self.weights + self.prompt + self.entry * tokens / 2


@dataclass(frozen=True)
class CellCost:
    """Work of a cell.

    Attributes:
        flops: of the language model's prefill or denoising steps, of all samples.
        samples: their number.
        visual: visual tokens of one sample, before any reduction.
        text: its other tokens.
        tower: FLOPs of the vision tower and the projector, of all samples.
        launches: layers of the language model that run before answers are decoded, over all batches.
        layers: of the language model.
        decoding: of answers that are generated token by token; None: they are denoised, or `missing`.
        missing: unknown facts of the answers; empty: they are counted.
    """

    flops: int
    samples: int
    visual: int
    text: int
    tower: int
    launches: int
    layers: int
    decoding: Decoding | None = None
    missing: str = ""

    @property
    def answer_tokens(self) -> Span:
        """Tokens of all counted answers."""
        return Span(0, 0) if self.decoding is None else self.decoding.tokens.times(self.samples)

    def seconds(self, gpu: GpuKind) -> Span:
        """Return the time of all counted work on a GPU."""
        return Span(self._seconds(gpu, 0), self._seconds(gpu, 1))

    def _seconds(self, gpu: GpuKind, end: int) -> float:
        rates = reached()
        launch = rates.launch[end]
        products = (self.flops + self.tower) / gpu.flops * rates.products[end]
        seconds = max(products, self.launches * launch)
        if self.decoding is not None:
            tokens = self.decoding.tokens[end]
            read = self.decoding.step_bytes(tokens) / gpu.bandwidth * rates.reads[end]
            seconds += self.decoding.batches * tokens * max(read, self.layers * launch)
        return seconds


class UnknownCost(ValueError):
    """The reason why the cost of a cell cannot be estimated offline."""


def cost_of(
    spec: RunSpec, method: Method, answer_tokens: Mapping[str, int] | None = None
) -> CellCost:
    """Return the estimated cost of a cell.

    Args:
        spec: the cell.
        method: its method.
        answer_tokens: tokens of an answer by benchmark, before those of conf/answer_lengths.yaml.

    Raises:
        UnknownCost: its samples, their visual tokens or the steps of a denoised answer are not known before it runs.
        Refused: the method cannot reach the ratio on this model.
    """
    facts, samples = spec.model.facts, _samples(spec)
    if spec.benchmark.dataset.video:
        raise UnknownCost(f"benchmark {spec.benchmark.name}: lengths of its videos")
    visual, layers = facts.visual_tokens, facts.text.layers
    stated = spec.benchmark.prompt_tokens
    text = NOMINAL_TEXT if stated is None else max(stated - visual, 0)
    tower = samples * _tower_flops(facts)
    size = spec.engine.batch_size
    rows = 1 if size == "auto" else size
    batches = math.ceil(samples / rows)
    if facts.diffusion is not None:
        flops, steps = _denoising_work(spec, method, text)
        launches = batches * steps * layers
        return CellCost(samples * flops, samples, visual, text, tower, launches, layers)
    reducer = _reducer(spec, method)
    kept = spec.budget.keep(reducer, facts, visual, text)
    entering = frame_of(reducer, facts, visual, text).entering(kept)
    if facts.canvas is not None:
        settings = CanvasSettings.of(spec.generation, facts.canvas.length)
        flops, steps = _canvas_work(facts, settings, entering, text)
        launches = batches * steps * layers
        return CellCost(samples * flops, samples, visual, text, tower, launches, layers)
    each = text_flops(facts, entering, text) + head_flops(facts)
    length = _answer_length(spec, answer_tokens or {})
    decoding, missing = None, ""
    if length is None:
        name = spec.benchmark.name
        missing = (
            f"benchmark {name}: length of its answers (cluster.answer_tokens={{{name}: <tokens>}})"
        )
    else:
        entry = rows * entry_bytes(spec.model)
        prompt = int(entry * (fmean(entering) + text))
        decoding = Decoding(length, batches, decoder_bytes(spec.model), prompt, entry)
    launches = batches * layers
    work = (samples * each, samples, visual, text, tower, launches, layers)
    return CellCost(*work, decoding, missing)


def _answer_length(spec: RunSpec, answer_tokens: Mapping[str, int]) -> Span | None:
    """Return the tokens of an answer: exact, as the user or the table states, or up to the limit; None: unknown."""
    benchmark = spec.benchmark
    exact = benchmark.new_tokens or answer_tokens.get(benchmark.name)
    if exact is not None:
        return Span(exact, exact)
    limit = benchmark.generation.get("max_new_tokens")
    typical = typical_length(benchmark.name, spec.model.name)
    if limit is None:
        return typical
    low, high = typical or (1, limit)
    return Span(min(low, limit), min(high, limit))


def _tower_flops(facts: ModelFacts) -> int:
    """Return the FLOPs of tower, stem and projector on one picture of nominal size."""
    work = facts.expected_work
    return tower_flops(facts, work) + projector_flops(facts, work.units, pooled=work.pooled)


def _denoising_work(spec: RunSpec, method: Method, text: int) -> tuple[int, int]:
    """Return the FLOPs of one answer, and its forwards.

    Each step processes the whole prompt and every place of the answer, or the places alone after a cached prompt.
    """
    facts = spec.model.facts
    assert facts.diffusion is not None  # of the caller
    settings = Denoising.of(spec.generation, facts.diffusion)
    reducer = method if isinstance(method, TokenReducer) else _reducer(spec, method)
    places, visual = text + settings.length, facts.visual_tokens
    head = sum(head_flops(facts, scored) for scored in settings.scored)
    if settings.prefix_cache:
        kept = spec.budget.keep(reducer, facts, visual, text)
        entering = frame_of(reducer, facts, visual, text).entering(kept)
        step = cached_prompt_flops(facts, entering, text, settings.length)
        return text_flops(
            facts, entering, text
        ) + settings.planned * step + head, settings.planned + 1
    frame = frame_of(reducer, facts, visual, places)
    budgets = step_budgets(reducer, spec.budget, facts, settings.planned, blocks=settings.blocks)
    steps = (frame.entering(budget.keep(reducer, facts, visual, places)) for budget in budgets)
    total = sum(
        cached_prompt_flops(facts, entering, places - window, window, part)
        if window
        else text_flops(facts, entering, places)
        for entering, window, part in zip(steps, settings.windows, settings.parts, strict=True)
    )
    return total + head, settings.planned


def _canvas_work(
    facts: ModelFacts, settings: CanvasSettings, entering: Sequence[int], text: int
) -> tuple[int, int]:
    """Return the FLOPs of one answer and its forward passes, if no canvas ends early and no layer slides."""
    size = canvas_of(facts).length
    canvases = range(settings.length // size)
    entries = [[visual + text + number * size for visual in entering] for number in canvases]
    visible = [[count + size for count in canvas] for canvas in entries]
    pairs = [[size * count + size * (size + 1) // 2 for count in canvas] for canvas in entries[:-1]]
    steps = [settings.steps] * len(canvases)
    answer = answer_flops(facts, steps, visible, pairs) + head_flops(facts, sum(steps) * size)
    return text_flops(facts, entering, text) + answer, sum(steps) + len(canvases)


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


@dataclass(frozen=True)
class AnswerLength:
    """The length of answers to some benchmarks.

    Attributes:
        benchmarks: their names.
        tokens: fewest and most.
        source: where the numbers come from.
        models: patterns of the models that they hold for; empty: all.
    """

    benchmarks: SomeNames
    tokens: tuple[Count, ...]
    source: Text
    models: Names = ()


@cache
def answer_lengths() -> tuple[AnswerLength, ...]:
    """Return the entries of the file, those for single models first."""
    entries: Any = read_yaml(ANSWER_LENGTHS)["lengths"]
    lengths = [
        read_section(
            AnswerLength, f"{ANSWER_LENGTHS.name}, entry {number}", {"models": [], **entry}
        )
        for number, entry in enumerate(entries, 1)
    ]
    return tuple(sorted(lengths, key=lambda length: not length.models))


@cache
def typical_length(benchmark: str, model: str) -> Span | None:
    """Return the fewest and the most tokens of an answer; None: the file does not know them."""
    for length in answer_lengths():
        patterns = length.models or ("*",)
        if benchmark in length.benchmarks and any(fnmatch(model, name) for name in patterns):
            return Span(*map(float, length.tokens))
    return None


@dataclass(frozen=True)
class JobHours:
    """Seconds of a job from its start to its end, and the GPUs that it holds."""

    seconds: Span
    gpus: int

    @classmethod
    def of(cls, spec: RunSpec, gpus: int, costs: Iterable[CellCost], gpu: GpuKind) -> JobHours:
        """Return the time of a job.

        Args:
            spec: of one of its cells, which share a model.
            gpus: of the job at least; more where the memory of this kind is too small.
            costs: of its cells.
            gpu: the kind.
        """
        rates, models = reached(), models_of(spec)
        weights = sum(map(weight_bytes, models))
        needed = sum(gpus_for(model, gpu.memory) for model in models)
        work = (cost.seconds(gpu) for cost in costs)
        seconds = Span.total((rates.start, rates.loading.times(weights), *work))
        return cls(seconds, max(gpus, needed))

    @property
    def minutes(self) -> Span:
        """Minutes from start to end."""
        return self.seconds.times(1 / 60)

    @property
    def gpu_hours(self) -> Span:
        """Hours of all its GPUs."""
        return self.seconds.times(self.gpus / 3600)


def hours_text(hours: Span) -> str:
    """Return a span of GPU-hours as text: `2.1 to 14 GPU-hours`."""
    low, high = (f"{bound:,.0f}" if bound >= 100 else f"{bound:.2g}" for bound in hours)
    return f"{low} to {high} GPU-hours"
