"""Evaluate a model under a method on one benchmark.

lmms-eval asks and scores, the engine answers, the journal remembers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from espalier.harness.errors import UserError
from espalier.harness.evaluation.cost_summary import time_medians
from espalier.harness.evaluation.samples import (
    Failure,
    Journal,
    Key,
    Sample,
    SampleErrors,
    score_entries,
)
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.ranks import Ranks, alone
from espalier.harness.specs.run_spec import RunSpec
from espalier.methods.base import Method

if TYPE_CHECKING:
    from espalier.harness.engine.artifacts.priors import Prior
    from espalier.harness.evaluation.lmms_tasks import Loaded
    from espalier.harness.evaluation.task_cache import Shelf
    from espalier.harness.kinds.kind import PairedSessions, Responder
    from espalier.harness.models.adapter import Adapter

__all__ = ["Evaluation", "Failure", "Sample", "SampleErrors", "evaluate", "evaluate_session"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Evaluation:
    """Everything that one benchmark run yields.

    Attributes:
        metrics: {name: {"value", "stderr"}} of the benchmark; None where it is not known.
        n_samples: samples that were scored.
        samples: answers with telemetry, in the order of the benchmark.
        scores: {(task, doc id): {metric: contribution}}; of a mean over samples the sample's own value.
        failures: samples that raised; excluded from everything above.
        resumed: how many answers came from the journal.
        seconds: wall time spent answering the others, warm-up excluded; of several processes the
            longest.
        versions: {task: version} as lmms-eval reports them.
        batch_size: samples in one batch, as set or as found.
        ahead: batches read ahead of the answers, at most.
        reading_ms: milliseconds a sample of reading and preprocessing, and of waiting for it; None if none was read.
        prompt: the first answered sample's, as it went to the processor, and the hashes of the chat templates.
        speedup: what the method's phases gain on the unreduced model's, as the row has it; None if not measured.
        speedup_note: how it was measured, or why not.
        aggregation: how each metric comes out of its samples (harness/evaluation/sample_contributions.py).
        unparsed: answers in no form that the scorer knows; where it does not tell, those whose reasoning never ends,
            None if there are none.
        judge: which judge scored the answers and how that went; None where none was asked.
        latency: times and memory of both sides where the harness composes the prompts; None elsewhere.
    """

    metrics: Mapping[str, Mapping[str, float | None]]
    n_samples: int
    samples: tuple[Sample, ...]
    scores: Mapping[Key, Mapping[str, float]]
    failures: tuple[Failure, ...]
    resumed: int
    seconds: float
    versions: Mapping[str, Any]
    batch_size: int = 1
    ahead: int = 0
    reading_ms: Mapping[str, float] | None = field(default=None, compare=False)
    prompt: Mapping[str, str | None] = field(default_factory=dict)
    speedup: Mapping[str, Any] | None = None
    speedup_note: str = ""
    aggregation: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unparsed: int | None = None
    judge: Mapping[str, Any] | None = None
    latency: Mapping[str, Any] | None = None

    @property
    def time(self) -> dict[str, float | None]:
        """Medians of phase times over samples in milliseconds, as the row names them."""
        return time_medians([sample.record for sample in self.samples])

    @property
    def samples_per_second(self) -> float | None:
        """Answers per second of all processes together; None if every answer came from the journal."""
        fresh = len(self.samples) - self.resumed
        return fresh / self.seconds if fresh and self.seconds else None


def evaluate(
    spec: RunSpec,
    adapter: Adapter,
    method: Method,
    journal: Journal,
    progress: Progress | None = None,
    *,
    prior: Prior | None = None,
    ranks: Ranks | None = None,
    answered: Callable[[], None] | None = None,
    loaded: Loaded | None = None,
) -> Evaluation:
    """Open what answers by `method` and evaluate; see `evaluate_session`.

    `prior` is the calibrated prior for methods that need one, `ranks` the processes that share
    the work, `answered` is called when the run has ended and only its speed-up is left to measure, `loaded` is what
    `open_benchmark` returned.
    """
    kind = kind_of(method, spec)
    reason = kind.why_no_paired_timing(spec, method)
    with kind.open(spec, adapter, method, prior) as opened:
        rivals = opened.rivals if reason is None else None
        done = evaluate_session(
            spec, opened.responder, journal, progress, ranks, rivals, answered, loaded, adapter
        )
    return done if reason is None else replace(done, speedup_note=reason)


def open_benchmark(spec: RunSpec, ranks: Ranks | None = None, shelf: Shelf | None = None) -> Loaded:
    """Load the benchmark's task and data; before the model, so that what is missing is found before weights are read.

    `shelf` has what earlier openings of the command read; the tasks are made anew.

    Raises:
        UserError: the task, its data, a metric or the limit cannot work.

    Cost: seconds, once for each process, to import lmms-eval; whoever only reads rows need not pay.
    """
    # Brings in lmms-eval: seconds, and whoever only catches the errors above need not pay.
    from espalier.harness.evaluation.box_format import tell
    from espalier.harness.evaluation.data_errors import check_references
    from espalier.harness.evaluation.denoising_lengths import check_denoised
    from espalier.harness.evaluation.derived_metrics import check_derived, needed
    from espalier.harness.evaluation.judged_tasks import judging
    from espalier.harness.evaluation.lmms_tasks import check_metrics, load_tasks, quiet
    from espalier.harness.evaluation.local_data import local_data
    from espalier.harness.evaluation.prompt_text import change_prompts, check_text
    from espalier.harness.evaluation.stated_answers import add_statements
    from espalier.harness.evaluation.statistical_units import check_cluster

    bench, ranks = spec.benchmark, ranks or Ranks()
    check_limit(bench.limit)
    with alone(), quiet():
        loaded = ranks.in_turn(
            lambda: load_tasks(
                bench.task,
                bench.include_path,
                spec.offline,
                spec.model.template,
                local_data(bench),
                bench.dataset.pinned,
                shelf,
            )
        )
        check_denoised(loaded.tasks, spec)
        add_statements(loaded.tasks, bench.answers)
        check_derived(loaded.tasks, bench)
        check_metrics(loaded.tasks, needed(bench, loaded.tasks))
        check_cluster(loaded.tasks, bench.cluster)
        change_prompts(loaded.tasks, bench.prompt)
        check_text(loaded.tasks, bench.text)
        if not loaded.ours or bench.dataset.path is not None:
            # Of data of the user's own the task says itself what it holds answers against, if anything.
            check_references(loaded.tasks, bench.limit)
        tell(loaded.tasks, spec.model, bench)
        judging(spec, loaded.tasks)
    assert loaded.borders is not None
    borders = replace(loaded.borders, transparency=spec.model.transparency)
    return replace(loaded, borders=borders)


def evaluate_session(
    spec: RunSpec,
    responder: Responder,
    journal: Journal,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
    rivals: PairedSessions | None = None,
    answered: Callable[[], None] | None = None,
    loaded: Loaded | None = None,
    adapter: Adapter | None = None,
) -> Evaluation:
    """Answer the samples that the journal lacks, score all, and write the scores to the journal.

    Args:
        spec: the run; benchmark, engine, seed and the model's generation settings are read.
        responder: what answers, already open.
        journal: finished samples; gains one entry for each new answer or failure.
        progress: called with (finished, total).
        ranks: the processes that share the work, each in a call of its own; all return the same.
        rivals: what is timed beside each other afterwards, by rank 0 while the others wait; None: nothing.
        answered: called before that.
        loaded: what `open_benchmark` returned; None: it is called here.
        adapter: the model, whose bytes bound what is timed of prompts that the harness composes; None: nothing is.

    Raises:
        UserError: the benchmark's task, metrics or limit cannot work; nothing was generated.
        SampleErrors: more samples failed than `engine.max_errors` allows; all answers are kept.
        JudgeLost: the judge of a judged task does not answer; all answers are kept.
    """
    # These bring in lmms-eval, seconds, and whoever only reads rows need not pay.
    from espalier.harness.evaluation.chat_model import ChatModel
    from espalier.harness.evaluation.data_errors import guard_targets
    from espalier.harness.evaluation.derived_metrics import needed
    from espalier.harness.evaluation.judged_tasks import judging
    from espalier.harness.evaluation.latency import Clocked
    from espalier.harness.evaluation.lmms_requests import ask, served
    from espalier.harness.evaluation.paired_times import Paired, measured
    from espalier.harness.evaluation.sample_contributions import score
    from espalier.harness.evaluation.scoring_guards import (
        check_values,
        guard_aggregation,
        guard_scoring,
    )

    bench, ranks = spec.benchmark, ranks or Ranks()
    loaded = loaded or open_benchmark(spec, ranks)
    tasks = loaded.tasks
    clocked = None if bench.prompt_tokens is None else Clocked(bench, spec.seed)
    if clocked is not None:
        clocked.compose(tasks, responder.encode)
    evaluation: Evaluation | None = None
    judge = judging(spec, tasks)
    with served(loaded):
        unscored: list[Failure] = []
        for task in tasks:
            verdicts = judge.verdict if clocked is None else clocked.verdict
            guard_scoring(task, unscored, verdicts, bench.answers)
            guard_aggregation(task, bench.name, needed(bench, tasks), len(tasks) > 1)
            guard_targets(task)
        complete = judge.ask if clocked is None else clocked.take
        borders = loaded.borders
        model = ChatModel(responder, journal, spec, tasks, progress, ranks, complete, borders)
        results = ask(model, loaded, spec)
        failures = (*model.failures, *unscored)
        if len(failures) > spec.engine.max_errors:
            raise SampleErrors(failures, len(model.samples) + len(model.failures))
        samples = _scored(model.samples.values(), unscored)
        check_values(results, tasks, bench)
        scored = score(results, tasks, bench, loaded.ours)
        kept = score_entries(scored.scores, scored.units, scored.values, scored.own)
        journal.append(*judge.entries(), *kept)
        if answered is not None:
            answered()
        beside, timed = Paired(None, ""), None
        if clocked is not None and adapter is not None:
            beside = Paired(None, "extra.latency has both sides")
            timed = clocked.measure(model, responder, rivals, adapter)
        elif rivals is not None:
            beside = measured(spec, rivals, model, ranks.world)
        evaluation = Evaluation(
            metrics=scored.metrics,
            n_samples=len(samples),
            samples=samples,
            scores=scored.scores,
            failures=failures,
            resumed=model.resumed,
            seconds=model.seconds,
            versions=dict(results["versions"]),
            batch_size=model.batch_size,
            ahead=model.ahead,
            reading_ms=model.reading.ms,
            prompt=model.prompt,
            speedup=beside.speedup,
            speedup_note=beside.note,
            aggregation=scored.how,
            unparsed=_unparsed(scored.unparsed, samples),
            judge=judge.told(),
            latency=timed,
        )
    # Rank 0 alone has scored.
    return ranks.gather(evaluation)[0]


def check_limit(limit: object) -> None:
    """Raise UserError unless `limit` is None or a positive integer.

    Inside lmms-eval a fraction would become the first task's count for every following task.
    """
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise UserError(f"limit={limit!r} must be an integer of at least 1, or null for all")


def _unparsed(told: int | None, samples: Sequence[Sample]) -> int | None:
    """Return what a benchmark tells of unreadable answers; else how many ended within their reasoning, if any did."""
    return (
        told if told is not None else sum(bool(s.answer) > bool(s.scored) for s in samples) or None
    )


def _scored(samples: Iterable[Sample], unscored: Sequence[Failure]) -> tuple[Sample, ...]:
    """Return the scored samples in benchmark order."""
    dropped = {failure.key for failure in unscored}
    return tuple(sorted((s for s in samples if s.key not in dropped), key=lambda one: one.key))
