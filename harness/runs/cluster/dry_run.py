"""`run.py ... --dry`: print the grid, finished cells, the jobs and their cost, without running anything."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.cost.budget import NOMINAL_TEXT, frame_of
from espalier.harness.cost.facts import ModelFacts, StackFacts, Work
from espalier.harness.cost.flops import (
    cached_prompt_flops,
    head_flops,
    projector_flops,
    text_flops,
    tower_flops,
)
from espalier.harness.cost.rehearsed import PATCHES, frame_tokens
from espalier.harness.decoding.diffusion.answer_flops import answer_flops, canvas_of
from espalier.harness.decoding.diffusion.denoising_settings import Denoising
from espalier.harness.decoding.diffusion.step_budgets import step_budgets
from espalier.harness.engine.artifacts import with_scheme
from espalier.harness.errors import NotCached, Refused, UserError, print_lines
from espalier.harness.kinds.checkpoint_check import decoder_bytes, entry_bytes
from espalier.harness.kinds.lookup import kind_of, label_of, method_of
from espalier.harness.paths import CONF
from espalier.harness.ranks import Ranks
from espalier.harness.runs import streams
from espalier.harness.runs.admission import admit_here
from espalier.harness.runs.cluster.cluster_sweep import ClusterCell, job_groups
from espalier.harness.runs.cluster.job_file import JobGroup
from espalier.harness.runs.cluster.launchers import devices
from espalier.harness.runs.cluster.resources import (
    ClusterSpec,
    GpuKind,
    Span,
    gpus_for,
    models_of,
    reached,
    weight_bytes,
)
from espalier.harness.runs.runner import Runner
from espalier.harness.runs.streams import StatusLine
from espalier.harness.specs import hub_cache
from espalier.harness.specs.comparable import grouped
from espalier.harness.specs.generation import CanvasSettings
from espalier.harness.specs.hub_cache import cached_commit, data_set_cached
from espalier.harness.specs.run_spec import ModelSpec, RunSpec
from espalier.harness.store import RunDir
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import Decoder, Method, MethodError, TokenReducer
from espalier.methods.none import NoReduction

ANSWER_LENGTHS = CONF / "answer_lengths.yaml"


#: What makes an estimate wide, as the lines name it: each has two ends in conf/gpus.yaml or conf/answer_lengths.yaml.
CAUSES = {
    "products": "the share of the peak FLOP/s",
    "reads": "the share of the bandwidth",
    "launch": "launches",
    "loading": "loading",
    "start": "starting",
    "answers": "lengths of answers",
    "acceptance": "accepted drafts",
}

#: Where each cause stands between its ends, -1 and 1; one that is missing stands in the middle.
Places = Mapping[str, float]


def rate(cause: str, places: Places) -> float:
    """Return what runs reach where a cause stands."""
    span: Span = getattr(reached(), cause)
    return span.at(places.get(cause, 0))


def launch_seconds(stack: StackFacts, places: Places) -> float:
    """Return the least time of a forward through the layers of a stack."""
    return stack.layers * reached().launch_of(stack).at(places.get("launch", 0))


@dataclass(frozen=True)
class DecodingSide:
    """A model that decodes, with the work of one step.

    Attributes:
        weights: bytes of weights that a step reads.
        prompt: bytes of cache that a step reads of a batch's prompts.
        entry: bytes of cache of a batch's new tokens, one each.
        stack: its layers.
    """

    weights: int
    prompt: int
    entry: int
    stack: StackFacts

    def seconds(self, gpu: GpuKind, places: Places, tokens: float) -> float:
        """Return the time of a step, the mean over all steps of an answer."""
        read = (self.weights + self.prompt + self.entry * tokens / 2) / gpu.bandwidth
        return max(read * rate("reads", places), launch_seconds(self.stack, places))


@dataclass(frozen=True)
class Rounds:
    """Rounds of a speculative decoder.

    Attributes:
        draft: the side that drafts.
        window: tokens drafted in a round; None: as many as fit into a step of the target.
        overlap: whether the draft works while the target verifies.
    """

    draft: DecodingSide
    window: int | None
    overlap: bool

    def seconds(self, gpu: GpuKind, places: Places, tokens: float, step: float) -> float:
        """Return the time of each token of an answer, with the time of the target's `step`."""
        drafted = self.draft.seconds(gpu, places, tokens)
        window = self.window or max(round(step / drafted), 1)
        share = rate("acceptance", places)
        # Accepted tokens are a run from the first one on; the target adds one.
        accepted = (1 - math.pow(share, window + 1)) / (1 - share)
        drafting = window * drafted
        return (max(step, drafting) if self.overlap else step + drafting) / accepted


@dataclass(frozen=True)
class Decoding:
    """Answers that are generated token by token.

    Attributes:
        tokens: of one answer, the mean over all.
        batches: of samples that are answered together.
        longest: steps of a batch over the mean length of its answers.
        target: the model.
        rounds: of a speculative decoder; None: a token a step.
        plainly: whether each answer is also decoded without a draft.
    """

    tokens: Span
    batches: int
    longest: float
    target: DecodingSide
    rounds: Rounds | None = None
    plainly: bool = True

    def seconds(self, gpu: GpuKind, places: Places) -> float:
        """Return the time of all steps."""
        tokens = self.tokens.at(places.get("answers", 0))
        step = self.target.seconds(gpu, places, tokens)
        token = step * self.plainly
        if self.rounds is not None:
            token += self.rounds.seconds(gpu, places, tokens, step)
        return self.batches * self.longest * tokens * token


@dataclass(frozen=True)
class CellCost:
    """Work of a cell.

    Attributes:
        flops: of the language model's prefill or denoising steps, of all samples.
        samples: their number.
        visual: visual tokens of one sample, before any reduction.
        text: its other tokens.
        tower: FLOPs of the vision tower and the projector, of all samples.
        forwards: of the language model before answers are decoded, over all batches.
        stack: its layers.
        decoding: of answers that are generated token by token; None: they are denoised, or `missing`.
        missing: unknown facts of the answers; empty: they are counted.
    """

    flops: int
    samples: int
    visual: int
    text: int
    tower: int
    forwards: int
    stack: StackFacts
    decoding: Decoding | None = None
    missing: str = ""

    @property
    def answer_tokens(self) -> Span:
        """Tokens of all counted answers."""
        return Span(0, 0) if self.decoding is None else self.decoding.tokens.times(self.samples)

    def seconds(self, gpu: GpuKind, places: Places = MappingProxyType({})) -> float:
        """Return the time of all counted work on a GPU."""
        products = (self.flops + self.tower) / gpu.flops * rate("products", places)
        prompts = max(products, self.forwards * launch_seconds(self.stack, places))
        return prompts + (0 if self.decoding is None else self.decoding.seconds(gpu, places))


class CostEstimate(NamedTuple):
    """The span of an estimate, and the cause that makes most of its width."""

    span: Span
    cause: str


def estimate_of(total: Callable[[Places], float]) -> CostEstimate:
    """Return the estimate of a total: each cause moves it from its middle by itself, and the moves add up in squares.

    Cost: twice as many totals as there are causes, and one.
    """
    middle = total({})
    moves = {
        cause: sorted(math.log(total({cause: place}) / middle) for place in (-1, 1))
        for cause in CAUSES
    }
    down, up = (math.hypot(*ends) for ends in zip(*moves.values(), strict=True))
    cause = max(moves, key=lambda name: moves[name][1] - moves[name][0])
    return CostEstimate(Span(middle * math.exp(-down), middle * math.exp(up)), CAUSES[cause])


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
    facts, benchmark = spec.model.facts, spec.benchmark
    counts = [n for n in (benchmark.limit, benchmark.dataset.samples) if n is not None]
    if not counts:
        raise UnknownCost(f"benchmark {benchmark.name}: number of its samples")
    samples, stated = min(counts), benchmark.prompt_tokens
    visual, work = _visual_work(spec)
    text = NOMINAL_TEXT if stated is None else max(stated - visual, 0)
    rows = 1 if spec.engine.batch_size == "auto" else min(spec.engine.batch_size, samples)
    batches, decoding, missing = math.ceil(samples / rows), None, ""
    if facts.diffusion is not None:
        flops, forwards = _denoising_work(spec, method, text)
    else:
        reducer = NoReduction() if isinstance(method, Decoder) else _reducer(spec, method)
        kept = spec.budget.keep(reducer, facts, visual, text)
        entering = frame_of(reducer, facts, visual, text).entering(kept)
        flops, forwards = text_flops(facts, entering, text) + head_flops(facts), 1
        if facts.canvas is not None:
            settings = CanvasSettings.of(spec.generation, facts.canvas.length)
            flops, forwards = _canvas_work(facts, settings, entering, text)
        elif (length := _answer_length(spec, answer_tokens or {})) is not None:
            # Lengths from none to twice the mean, as likely as each other, unless one is exact.
            longest = 2 * rows / (rows + 1) if length.low < length.high else 1
            target = _side(spec.model, rows, fmean(entering) + text)
            decoding = Decoding(length, batches, longest, target)
            if isinstance(method, Decoder) and method.source != "nobody":
                decoding = _drafted(decoding, spec, method, visual, text)
        else:
            name = benchmark.name
            option = f"cluster.answer_tokens={{{name}: <tokens>}}"
            missing = f"benchmark {name}: length of its answers ({option})"
    picture = tower_flops(facts, work) + projector_flops(facts, work.units, pooled=work.pooled)
    return CellCost(
        flops=samples * flops,
        samples=samples,
        visual=visual,
        text=text,
        tower=samples * picture,
        forwards=batches * forwards,
        stack=facts.text,
        decoding=decoding,
        missing=missing,
    )


def _visual_work(spec: RunSpec) -> tuple[int, Work]:
    """Return the visual tokens of a picture of nominal size or of a video, and the work before the decoder."""
    facts, model = spec.model.facts, spec.model
    if not spec.benchmark.dataset.video:
        return facts.visual_tokens, facts.expected_work
    tokens = frame_tokens().get(model.name)
    if tokens is None:
        raise UnknownCost(f"model {model.name}: tokens of a video's frame")
    visual, patches = round(tokens * model.video.frames), round(PATCHES * tokens)
    work = Work(patches * model.video.frames, patches**2 * model.video.frames, visual)
    return visual, work


def _side(model: ModelSpec, rows: int, prompt: float) -> DecodingSide:
    """Return a model that decodes `rows` answers at a time after a prompt of some tokens."""
    entry = rows * entry_bytes(model)
    return DecodingSide(decoder_bytes(model), int(entry * prompt), entry, model.facts.text)


def _drafted(
    decoding: Decoding, spec: RunSpec, method: Decoder, visual: int, text: int
) -> Decoding:
    """Return the decoding in rounds, without the draft's prefill."""
    draft_visual = 0 if method.text_only else spec.budget.draft_keep(visual)
    draft = _side(spec.method.draft or spec.model, 1, draft_visual + text)
    window = method.window if isinstance(method.window, int) else None
    rounds = Rounds(draft, window, method.overlap)
    return replace(decoding, rounds=rounds, plainly=spec.engine.compare)


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


def _reducer(spec: RunSpec, method: Method) -> TokenReducer:
    """Return the reducer of the prefill; a method that evicts after it leaves it unreduced."""
    reducer = kind_of(method, spec).prompt_reducer(method)
    assert reducer is not None  # only a decoder has none
    return reducer


@cache
def answer_lengths() -> list[dict[str, Any]]:
    """Return the entries of the file: benchmarks, fewest and most tokens, source; those for single models first."""
    entries: list[dict[str, Any]] = read_yaml(ANSWER_LENGTHS)["lengths"]
    return sorted(entries, key=lambda entry: "models" not in entry)


@cache
def typical_length(benchmark: str, model: str) -> Span | None:
    """Return the fewest and the most tokens of an answer; None: the file does not know them."""
    for entry in answer_lengths():
        patterns = entry.get("models", ["*"])
        if benchmark in entry["benchmarks"] and any(fnmatch(model, name) for name in patterns):
            return Span(*map(float, entry["tokens"]))
    return None


def job_seconds(group: JobGroup[PlannedCell], gpu: GpuKind, places: Places) -> float:
    """Return the time of a job from its start to its end, on GPUs of a kind."""
    loading = sum(map(weight_bytes, _models(group))) * rate("loading", places)
    work = sum(cost.seconds(gpu, places) for cost in costs_of([group]))
    return rate("start", places) + loading + work


def job_gpus(group: JobGroup[PlannedCell], gpu: GpuKind) -> int:
    """Return the GPUs that a job holds: more than it requests where their memory is too small."""
    needed = sum(gpus_for(model, gpu.memory) for model in _models(group))
    return max(group.resources.gpus, needed)


def _models(group: JobGroup[PlannedCell]) -> list[ModelSpec]:
    # Its cells share a model.
    return models_of(group.cells[0].cell.spec)


def hours_of(jobs: Sequence[JobGroup[PlannedCell]], gpu: GpuKind) -> CostEstimate:
    """Return the GPU-hours of jobs."""

    def total(places: Places) -> float:
        return sum(job_seconds(job, gpu, places) * job_gpus(job, gpu) for job in jobs) / 3600

    return estimate_of(total)


def hours_text(hours: Span) -> str:
    """Return a span of GPU-hours as text: `2.1 to 14 GPU-hours`."""
    low, high = (f"{bound:,.0f}" if bound >= 100 else f"{bound:.2g}" for bound in hours)
    return f"{low} to {high} GPU-hours"


@dataclass(frozen=True)
class PlannedCell:
    """A cell, and the information available without running it.

    Attributes:
        cell: the composed cell.
        run: its run key, or a substitute if that cannot be computed here.
        status: `done`, `begun`, `to do` or `refused`.
        problem: the reason if it is refused, or an input that is missing on this machine; else None.
        cost: its estimated cost; None: see `unknown`.
        unknown: why the cost cannot be estimated.
    """

    cell: ClusterCell
    run: str
    status: str
    problem: str | None = None
    cost: CellCost | None = None
    unknown: str | None = None


def list_cells(cells: Sequence[ClusterCell], cluster: ClusterSpec, waiting: StatusLine) -> int:
    """Print the runs of a command without running them, and return the exit code."""
    planned, digests, runner = [], Digests(), Runner()
    for number, cell in enumerate(cells, 1):
        waiting.say(f"checking cell {number} of {len(cells)}")
        planned.append(plan(cell, digests, runner, cluster))
    waiting.clear()
    with streams.output():
        print_lines(*lines_of(planned, cluster))
    return 0


def plan(cell: ClusterCell, digests: Digests, runner: Runner, cluster: ClusterSpec) -> PlannedCell:
    """Return the plan of a cell; from the model's facts alone, if inputs are missing on this machine.

    Cost: that of its checks; weights that have a checksum are read once.
    """
    spec, job, status, problem = cell.spec, None, "to do", None
    try:
        job = admit_here(spec, Ranks(), digests, places=False)
    except Refused as error:
        return PlannedCell(cell, repr(spec), "refused", str(error))
    except UserError as error:
        is_fetched = isinstance(error, NotCached) and repositories_of(spec, cluster)
        problem = None if is_fetched else str(error)
    if job is not None:
        spec, method = job.spec, job.method
        directory = RunDir(spec.store / "runs" / job.key)
        if runner.cells.stored(job) is not None:
            status = "done"
        elif len(directory.forced if spec.force else directory.journal):
            status = "begun"
    cost, unknown = None, None
    try:
        if job is None:
            method = method_of(spec.method)
            spec = kind_of(method, spec).normalise(spec, method)
            if isinstance(method, TokenReducer) and method.in_one_prefill:
                method = with_scheme(spec.model, method, spec.method.name, digests, spec.store)
        cost = cost_of(spec, method, cluster.answer_tokens)
    except (Refused, MethodError) as error:
        return PlannedCell(cell, repr(spec), "refused", str(error))
    except UnknownCost as error:
        unknown = str(error)
    except UserError as error:
        unknown = f"method {spec.method.name}: {error}"
    run = repr(spec) if job is None else job.key
    return PlannedCell(cell, run, status, problem, cost, unknown)


def repositories_of(spec: RunSpec, cluster: ClusterSpec) -> list[str]:
    """Return the repositories of the hub that a run would download; a cluster's jobs download nothing."""
    if cluster.name != "local" or spec.offline or hub_cache.BY_ENVIRONMENT:
        return []
    names = [
        str(model.hub)
        for model in (spec.model, spec.method.draft)
        if model is not None
        and (model.path, model.weights) == (None, "trained")
        and cached_commit(model) is None
    ]
    bench, name = spec.benchmark, spec.benchmark.dataset.path
    is_local = bench.path is not None or bench.records is not None
    return names if is_local or name is None or data_set_cached(name) else [*names, name]


def jobs_of(planned: Sequence[PlannedCell], cluster: ClusterSpec) -> list[JobGroup[PlannedCell]]:
    """Return the jobs of the cells that would run; cells of one run count once."""
    limit = len(planned) if cluster.name == "local" else cluster.cells_per_job
    return job_groups(
        ((cell.run, cell.cell, cell) for cell in planned if cell.status in TO_RUN), limit
    )


def lines_of(planned: Sequence[PlannedCell], cluster: ClusterSpec) -> Iterator[str]:
    """Yield the printed lines."""
    yield from grid_lines([cell.cell.spec for cell in planned])
    runs = {cell.run: cell for cell in planned}.values()
    counts = {status: sum(cell.status == status for cell in runs) for status in STATUSES}
    summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    yield f"runs in {planned[0].cell.spec.store}: {summary}"
    yield from _problems(planned)
    to_run = (cell.cell.spec for cell in planned if cell.status in TO_RUN)
    repositories = dict.fromkeys(name for spec in to_run for name in repositories_of(spec, cluster))
    if repositories:
        yield f"downloads of the runs: {', '.join(repositories)}"
    jobs = jobs_of(planned, cluster)
    if jobs:
        limit = _count(cluster.cells_per_job, "cell")
        backend = f" cluster.backend={cluster.backend}" if cluster.name == "joblib" else ""
        grouping = (
            "cluster=local: in this process, one model after the other"
            if cluster.name == "local"
            else f"cluster={cluster.name}{backend}, cluster.cells_per_job: at most {limit}"
        )
        yield f"jobs: {len(jobs)} ({grouping})"
        yield from _side_by_side(jobs, cluster)
    for number, job in enumerate(jobs):
        yield job_line(number, job, cluster)
        yield from cell_lines([cell.cell.spec for cell in job.cells])
    yield from estimate_lines(jobs, cluster)


def _side_by_side(jobs: Sequence[JobGroup[PlannedCell]], cluster: ClusterSpec) -> Iterator[str]:
    """Yield how all GPUs of this machine are used, if this process would leave some idle."""
    needed, n_gpus = min(job.resources.gpus for job in jobs), len(devices())
    cells = sum(len(job.cells) for job in jobs)
    at_once = min(n_gpus // max(needed, 1), cells)
    if cluster.name == "local" and needed and at_once > 1:
        size = math.ceil(cells / at_once)
        command = f"cluster=joblib cluster.cells_per_job={size}"
        yield f"this machine has {n_gpus} GPUs: {command} runs {at_once} jobs at once"


#: Statuses of cells that would run, and all of them.
TO_RUN, STATUSES = ("begun", "to do"), ("done", "begun", "to do", "refused")


def _problems(planned: Sequence[PlannedCell]) -> Iterator[str]:
    refused = planned[0].cell.spec.refused
    titles = {
        True: "cannot run, and is left out"
        if refused == "skip"
        else "cannot run, and stops the command (refused=skip leaves it out)",
        False: "missing on this machine",
    }
    for left_out, title in titles.items():
        by_reason = grouped(
            (cell.problem, cell)
            for cell in planned
            if cell.problem is not None and (cell.status == "refused") is left_out
        )
        for reason, cells in by_reason.items():
            yield f"{title}: {reason} ({len(cells)} of the cells)"
            if left_out:
                yield from cell_lines([cell.cell.spec for cell in cells])


#: Columns of a line.
WIDTH = 120

#: What the estimate takes as given; the visual tokens by model and the other tokens of prompts are filled in.
ASSUMED = (
    "peaks of GPUs and the shares of them that runs reach by conf/gpus.yaml (cluster.gpu_kinds adds to it); "
    "lengths of answers by conf/answer_lengths.yaml or the generation settings (cluster.answer_tokens overrides "
    "them); weights are loaded once a job; all GPUs of a job count while one works; visual tokens of a picture by "
    "model.facts.visual_tokens: {}; {} other tokens in a prompt; scoring, judges and the preparation of pictures "
    "are not counted"
)


def grid_lines(specs: Sequence[RunSpec]) -> Iterator[str]:
    """Yield the number of cells, and each model's methods, ratios and benchmarks."""
    models = dict.fromkeys(spec.model.name for spec in specs)
    yield f"{_count(len(specs), 'cell')} of {_count(len(models), 'model')}"
    for model in models:
        model_specs = [spec for spec in specs if spec.model.name == model]
        yield f"model {model}: {_count(len(model_specs), 'cell')}"
        axes = {
            "methods": (_method(spec) for spec in model_specs),
            "ratios": (spec.budget.amount for spec in model_specs),
            "budgets": (spec.budget.rule for spec in model_specs),
            "benchmarks": (_benchmark(spec) for spec in model_specs),
        }
        for title, values in axes.items():
            yield from _wrapped(f"  {title:<11}", ", ".join(dict.fromkeys(values)))


def job_line(number: int, group: JobGroup[PlannedCell], cluster: ClusterSpec) -> str:
    """Return the line of a job: its model, cells, resources and cost."""
    resources = group.resources
    parts = [
        f"job {number}: {group.model}, {_count(len(group.cells), 'cell')}",
        f"{_count(resources.gpus, 'GPU')}, {_count(resources.cpus, 'CPU')}, {resources.memory / 2**30:.1f} GiB, "
        f"{resources.minutes} min"
        + ("" if resources.partition is None else f", {resources.partition}"),
    ]
    costs = costs_of([group])
    if costs:
        parts.append(_flops(sum(cost.flops + cost.tower for cost in costs)))
    if costs and resources.gpus:
        name, gpu = next(iter(cluster.estimated_gpus.items()))
        hours = hours_of([group], gpu).span
        parts[-1] += f", {hours_text(hours)} on {name}{_without_answers(costs)}"
        minutes = hours.times(60 / job_gpus(group, gpu))
        if minutes.high > resources.minutes and cluster.name != "local":
            verb = "is" if minutes.low > resources.minutes else "may be"
            parts.append(f"{verb} longer than its time limit: continues in the queue's next turn")
    return "; ".join(parts)


def costs_of(jobs: Iterable[JobGroup[PlannedCell]]) -> list[CellCost]:
    """Return the known costs of the cells of jobs."""
    return [cell.cost for job in jobs for cell in job.cells if cell.cost is not None]


def cell_lines(specs: Iterable[RunSpec]) -> Iterator[str]:
    """Yield cells, a line for each method and ratio with its benchmarks."""
    by_method = grouped(
        (f"{_method(spec)} {spec.budget.amount}", _benchmark(spec)) for spec in specs
    )
    for name, benchmarks in by_method.items():
        yield from _wrapped(f"    {name}: ", ", ".join(dict.fromkeys(benchmarks)))


def estimate_lines(jobs: Sequence[JobGroup[PlannedCell]], cluster: ClusterSpec) -> Iterator[str]:
    """Yield the sum of all costs, by GPU, the assumptions, and the costs not included."""
    cells = [cell for job in jobs for cell in job.cells]
    costs = costs_of(jobs)
    with_gpu = [job for job in jobs if job.resources.gpus and costs_of([job])]
    if costs:
        without = len(costs) - len(costs_of(with_gpu))
        ends = [sum(end) for end in zip(*(cost.answer_tokens for cost in costs), strict=True)]
        bounds = dict.fromkeys(f"{end:,.0f}" for end in ends)
        yield (
            f"estimate: {_flops(sum(cost.flops for cost in costs))} of the language model, "
            f"{_flops(sum(cost.tower for cost in costs))} of the vision tower, "
            + (f"{' to '.join(bounds)} tokens of answers, " if ends[1] else "")
            + f"of {_count(len(costs), 'cell')}"
            + (f", {without} of them without a GPU" if without else "")
        )
    for name, gpu in cluster.estimated_gpus.items() if with_gpu else ():
        hours, cause = hours_of(with_gpu, gpu)
        note = _without_answers(costs_of(with_gpu))
        yield f"  {name}: {hours_text(hours)}{note}; most of the span is from {cause}"
    if with_gpu:
        yield from _shares([cell for job in with_gpu for cell in job.cells], gpu)
    if costs:
        counted = ((cell.cell.spec.model.name, cell.cost.visual) for cell in cells if cell.cost)
        pictures = dict.fromkeys(f"{model} {visual}" for model, visual in counted)
        texts = map(str, sorted({cost.text for cost in costs}))
        yield from _wrapped("assumed: ", ASSUMED.format(", ".join(pictures), ", ".join(texts)))
    missing = (cell.cost.missing for cell in cells if cell.cost and cell.cell.resources.gpus)
    unknown = (cell.unknown for cell in cells)
    for reason, count in Counter(filter(None, (*missing, *unknown))).items():
        yield f"not counted, unknown offline: {reason} ({_count(count, 'cell')})"


def _shares(cells: Sequence[PlannedCell], gpu: GpuKind) -> Iterator[str]:
    """Yield the benchmarks' shares of the time, and of one with more than half of it how to leave it out."""
    by_name = grouped((cell.cell.spec.benchmark.name, cell) for cell in cells if cell.cost)
    seconds = {
        name: sum(cell.cost.seconds(gpu) for cell in parts if cell.cost)
        for name, parts in by_name.items()
    }
    total = sum(seconds.values())
    shares = {
        name: seconds[name] / total for name in sorted(seconds, key=seconds.__getitem__)[::-1]
    }
    yield from _wrapped("time by benchmark: ", ", ".join(f"{n} {s:.0%}" for n, s in shares.items()))
    first, share = next(iter(shares.items()))
    if 0.5 < share < 1:
        note = by_name[first][0].cell.config["benchmark"].get("note") or "one benchmark"
        without = f"benchmark={','.join(name for name in seconds if name != first)}"
        yield from _wrapped(f"  {first}: ", f"{note} Without it: {without}")


def _method(spec: RunSpec) -> str:
    return f"{spec.method.title} {label_of(spec)}".strip()


def _benchmark(spec: RunSpec) -> str:
    limit = spec.benchmark.limit
    return spec.benchmark.name if limit is None else f"{spec.benchmark.name}[{limit}]"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _without_answers(costs: Sequence[CellCost]) -> str:
    """Return a note on answers that are not included; empty if all are."""
    without = sum(bool(cost.missing) for cost in costs)
    if not without:
        return ""
    part = "" if without == len(costs) else f" in {without} of {_count(len(costs), 'cell')}"
    return f" (decoding not counted{part})"


def _flops(flops: float) -> str:
    """Return FLOPs with three digits and a suitable unit."""
    units = ("", "K", "M", "G", "T", "P", "E")
    power = min(int(math.log10(flops) // 3), len(units) - 1) if flops else 0
    return f"{flops / 1000**power:.3g} {units[power]}FLOPs"


def _wrapped(head: str, text: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
