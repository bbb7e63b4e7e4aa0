"""Evaluate a model with a method on one benchmark.

lmms-eval makes the requests and scores the answers, the engine answers, the journal keeps the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from espalier.harness.evaluation.metered import (
    MeteredGenerator,
    open_meters,
)
from espalier.harness.evaluation.samples import (
    Failure,
    Sample,
    SampleErrors,
    score_entries,
)
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.ranks import Ranks, without_launcher
from espalier.harness.specs.generation import settings_of
from espalier.harness.specs.hub_cache import may_download, online
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.answer_digest import Key
from espalier.methods.base import Method

if TYPE_CHECKING:
    from espalier.harness.engine.priors import Prior
    from espalier.harness.evaluation.lmms_tasks import LoadedBenchmark
    from espalier.harness.evaluation.stated_answers import RunningScore
    from espalier.harness.evaluation.task_cache import TaskCache
    from espalier.harness.kinds.kind import OpenMethod
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.store.files.journal import Journal

__all__ = ["Evaluation", "Failure", "Sample", "SampleErrors", "evaluate", "evaluate_session"]

#: Called with (finished samples, all samples) at the start and after each batch.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Evaluation:
    """The results of one benchmark run.

    Attributes:
        metrics: {name: {"value", "stderr"}} of the benchmark; None for an unknown number.
        n_samples: samples that were scored.
        samples: answers with telemetry, in benchmark order.
        scores: {(task, doc id): {metric: contribution}}; for a mean over samples, the sample's value.
        failures: samples that raised; excluded from everything above.
        resumed: number of answers from the journal.
        seconds: wall time of the other answers without warm-up, the longest of all processes.
        versions: {task: version} as lmms-eval reports them.
        batch_size: samples in one batch, as set or found.
        ahead: largest number of batches read ahead of the answers.
        reading_ms: milliseconds per sample of reading and preprocessing, and of waiting for it; None if none was read.
        prompt: the prompt of the first answered sample, and the hashes of the chat templates.
        speedup: speed-up of the method's phases over the unreduced model, as the row has it; None if not measured.
        speedup_note: how it was measured, or why not.
        aggregation: how each metric follows from its samples (harness/evaluation/sample_contributions.py).
        unparsed: answers in no form that the scorer knows, or that state nothing if it counts none; None if answers are
            timed only.
        judge: the judge that scored the answers, with its counts; None without a judge.
        latency: times and memory of both sides if the harness composes the prompts, else None.
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
    def samples_per_second(self) -> float | None:
        """Answers per second, all processes together; None if every answer came from the journal."""
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
    loaded: LoadedBenchmark | None = None,
    running: RunningScore | None = None,
    served: AbstractContextManager[OpenMethod] | None = None,
) -> Evaluation:
    """Install `method` on the model and evaluate; see `evaluate_session`.

    `prior` is the calibrated prior for methods that need one, `ranks` the processes that share the work; `answered` is
    called when only the speed-up remains to be measured; `loaded` is the result of `open_benchmark`; `running` scores
    the answers as they come; `served` opens another engine, which answers in the model's place.
    """
    kind = kind_of(method, spec)
    reason = kind.why_no_paired_timing(spec, method)
    if served is not None:
        reason = f"backend={spec.backend.name} answers many prompts at a time"
    elif spec.model.offload:
        reason = "model.offload=true: times are those of copying layers from the host"
    elif spec.model.parallel == "tensor":
        reason = "model.parallel=tensor: processes wait for one another"
    with served or kind.open(spec, adapter, method, prior) as opened:
        meters, generator = open_meters(spec), opened.generator
        opened = replace(
            opened,
            generator=MeteredGenerator(generator, meters) if meters else generator,
            paired=opened.paired if reason is None else None,
        )
        evaluation = evaluate_session(
            spec, opened, journal, progress, ranks, answered, loaded, adapter, running
        )
    return evaluation if reason is None else replace(evaluation, speedup_note=reason)


def open_benchmark(
    spec: RunSpec, ranks: Ranks | None = None, shelf: TaskCache | None = None
) -> LoadedBenchmark:
    """Load the benchmark's task and data, before the model: missing data are found before weights are read.

    Data that are not on this machine are downloaded, unless `offline`; for what is here no connection is opened.

    `shelf` caches data of earlier openings in this command; the tasks are always made anew.

    Raises:
        UserError: the task, its data, or a metric cannot work.

    Cost: seconds, once in each process, to import lmms-eval.
    """
    # These import lmms-eval, which takes seconds.
    from espalier.harness.evaluation.data_sources import (
        add_categories,
        check_references,
    )
    from espalier.harness.evaluation.judged_tasks import judged_tasks_of
    from espalier.harness.evaluation.lmms_tasks import check_metrics, quiet
    from espalier.harness.evaluation.metric_scores import check_derived, needed_metrics
    from espalier.harness.evaluation.prompt_text import (
        change_prompts,
        check_text,
        fill_box_settings,
        place_pictures,
    )
    from espalier.harness.evaluation.sample_contributions import set_clusters
    from espalier.harness.evaluation.stated_answers import add_statements

    bench, ranks = spec.benchmark, ranks or Ranks()
    with without_launcher(), quiet():
        loaded = ranks.in_turn(lambda: _here_or_downloaded(spec, shelf))
        add_categories(loaded.tasks, bench)
        add_statements(loaded.tasks, bench.answers)
        check_derived(loaded.tasks, bench)
        check_metrics(loaded.tasks, needed_metrics(bench, loaded.tasks))
        set_clusters(loaded.tasks, bench)
        change_prompts(loaded.tasks, bench.prompt)
        if bench.text is None:
            place_pictures(loaded.tasks)
        check_text(loaded.tasks, bench.text)
        for task in loaded.tasks:
            settings_of(spec, task.config.generation_kwargs or {})
        if not loaded.ours or bench.dataset.path is not None:
            # For other data of our tasks references are optional.
            check_references(loaded.tasks, bench.limit if bench.cluster is None else None)
        fill_box_settings(loaded.tasks, spec.model, bench)
        judged_tasks_of(spec, loaded.tasks)
    assert loaded.borders is not None
    borders = replace(
        loaded.borders, offline=not may_download(spec.offline), transparency=spec.model.transparency
    )
    return replace(loaded, borders=borders)


def _here_or_downloaded(spec: RunSpec, shelf: TaskCache | None) -> LoadedBenchmark:
    """Return the tasks with the data of this machine; if some are missing, with those of the hub.

    Raises:
        UserError: the data are missing and may not be downloaded, or the hub refuses or cannot be reached.
    """
    # These import lmms-eval, which takes seconds.
    from espalier.harness.evaluation.data_sources import (
        DistantSource,
        MissingData,
        local_data,
        record_file,
    )
    from espalier.harness.evaluation.lmms_tasks import load_tasks

    bench = spec.benchmark

    def load(offline: bool) -> LoadedBenchmark:
        return load_tasks(
            bench.task,
            bench.include_path,
            offline,
            spec.model.template,
            local_data(bench),
            bench.dataset.pinned,
            shelf,
            record_file(bench),
        )

    try:
        return load(offline=True)
    except MissingData as error:
        if not may_download(spec.offline):
            raise
        # These import the hub's library.
        from espalier.harness.evaluation.hub_data import data_sets
        from espalier.harness.specs.hub_files import fetch

        repositories = data_sets(bench)
        if not repositories and not isinstance(error, DistantSource):
            raise
    for repository in repositories:
        fetch(repository)
    with online():
        return load(offline=False)


def evaluate_session(
    spec: RunSpec,
    opened: OpenMethod,
    journal: Journal,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
    answered: Callable[[], None] | None = None,
    loaded: LoadedBenchmark | None = None,
    adapter: Adapter | None = None,
    running: RunningScore | None = None,
) -> Evaluation:
    """Answer the samples that the journal lacks, score all, and write the scores to the journal.

    Args:
        spec: the run; of it benchmark, engine, seed and the model's generation settings are used.
        opened: the generator of answers, the adapter of its model, and the two sessions that rank 0 times in pairs
            afterwards, while the other processes wait.
        journal: finished samples; gains one entry for each new answer or failure.
        progress: called with (finished, total).
        ranks: the processes that share the work; each calls this function, and all return the same.
        answered: called before the pairs are timed.
        loaded: the result of `open_benchmark`; None: it is called here.
        adapter: the model, needed to time prompts that the harness composes; None: they are not timed.
        running: scores answers as they come; None: nothing does.

    Raises:
        UserError: the benchmark's task, or metrics cannot work; nothing was generated.
        SampleErrors: more samples failed than `engine.max_errors` allows; all answers are kept.
        JudgeLost: the judge of a judged task does not answer; all answers are kept.
    """
    # These import lmms-eval, which takes seconds.
    from lmms_eval.evaluator import simple_evaluate

    from espalier.harness.evaluation.chat_model import AllAnswered, ChatModel
    from espalier.harness.evaluation.judged_tasks import judged_tasks_of
    from espalier.harness.evaluation.latency import LatencyRun, PairedTimes, measure_run
    from espalier.harness.evaluation.lmms_tasks import scoring
    from espalier.harness.evaluation.metric_scores import (
        check_values,
        guard_aggregation,
        guard_scoring,
        needed_metrics,
    )
    from espalier.harness.evaluation.sample_contributions import score
    from espalier.harness.evaluation.stated_answers import count_unread

    bench, ranks = spec.benchmark, ranks or Ranks()
    loaded = loaded or open_benchmark(spec, ranks)
    tasks = loaded.tasks
    latency_run = None if bench.prompt_tokens is None else LatencyRun(bench, spec.seed)
    if latency_run is not None:
        latency_run.compose(tasks, opened.encode)
    evaluation: Evaluation | None = None
    judge = judged_tasks_of(spec, tasks)
    with scoring(loaded), suppress(AllAnswered):
        unscored: list[Failure] = []
        for task in tasks:
            verdicts = judge.verdict if latency_run is None else latency_run.verdict
            guard_scoring(task, unscored, verdicts, bench.answers)
            guard_aggregation(task, bench.name, needed_metrics(bench, tasks), len(tasks) > 1)
        complete = judge.ask if latency_run is None else latency_run.take
        model = ChatModel(
            opened, journal, spec, tasks, progress, ranks, complete, loaded.borders, running
        )
        results = simple_evaluate(model=model, **loaded.arguments(spec))
        failures = (*model.failures, *unscored)
        if len(failures) > spec.engine.max_errors:
            raise SampleErrors(failures, len(model.samples) + len(model.failures))
        dropped = {failure.key for failure in unscored}
        samples = tuple(model.samples[key] for key in sorted(model.samples.keys() - dropped))
        check_values(results, tasks, bench)
        scored = score(results, tasks, bench, loaded.ours)
        entries = score_entries(scored.scores, scored.units, scored.values, scored.sample_scores)
        journal.append(*judge.entries(), *entries)
        if answered is not None:
            answered()
        paired, latency = PairedTimes(None, ""), None
        if latency_run is not None and adapter is not None:
            paired = PairedTimes(None, "extra.latency has both sides")
            latency = latency_run.measure(model, opened, adapter)
        elif opened.paired is not None:
            paired = measure_run(spec, opened.paired, model, ranks.world)
        unparsed = count_unread(samples) if scored.unparsed is None else scored.unparsed
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
            speedup=paired.speedup,
            speedup_note=paired.note,
            aggregation=scored.how,
            unparsed=None if latency_run is not None else unparsed,
            judge=judge.summary(),
            latency=latency,
        )
    result = ranks.gather(evaluation)[0]
    assert result is not None  # rank 0 has scored
    return result
