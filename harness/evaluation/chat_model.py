"""The model that lmms-eval calls: it answers requests with the engine and journals the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.api.task import Task
from lmms_eval.evaluator import simple_evaluate

from espalier.harness.evaluation.batch_answers import (
    Answerer,
    find_batch_size,
    journalled_batch_size,
    key_of,
)
from espalier.harness.evaluation.data_sources import AllowedSources
from espalier.harness.evaluation.lmms_tasks import LoadedBenchmark, scoring
from espalier.harness.evaluation.prefetch import ReadingTimes, batches_ahead, read_ahead
from espalier.harness.evaluation.prompt_text import worded
from espalier.harness.evaluation.samples import (
    Failure,
    Sample,
    SampleErrors,
    finished_samples,
)
from espalier.harness.evaluation.stated_answers import RunningScore
from espalier.harness.kinds.kind import OpenMethod
from espalier.harness.models.chat_media import Chat
from espalier.harness.ranks import Ranks
from espalier.harness.specs.generation import Settings, settings_of
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.answer_digest import Key
from espalier.harness.store.files.journal import Journal

#: Called with (finished samples, all samples) at the start and after each batch.
Progress = Callable[[int, int], None]

#: If this many samples fail before any succeeds, the run is broken, and the other samples are not tried.
HOPELESS = 16

#: Generation settings, with the requests that have them: all of a run, or those of one batch.
RequestGroup = tuple[Settings, list[Instance]]


class AllAnswered(Exception):
    """All samples are answered, and rank 0, which scores them, has the answers: this process is done."""


class ChatModel(lmms):
    """Answers requests in batches and journals each answer; an answer in the journal is not computed again.

    Args:
        opened: the generator of answers, and the adapter of its model.
        journal: finished samples of this run.
        spec: batch size, warm-up, allowed errors, generation settings and seed.
        tasks: the tasks of the requests; failed samples are removed from them.
        progress: called with the progress of this process.
        complete: called in rank 0 with all answers, after they are journalled and before any is scored.
        ranks: the processes that share the work. lmms-eval does not know of them: each gets all requests, and the
            batches, the same as a single process would form, are dealt out here.
        borders: where media may come from; None: from anywhere.
        running: scores answers as they come; None: nothing does.
    """

    is_simple = False

    def __init__(
        self,
        opened: OpenMethod,
        journal: Journal,
        spec: RunSpec,
        tasks: Sequence[Task],
        progress: Progress | None = None,
        ranks: Ranks | None = None,
        complete: Callable[[Mapping[Key, Sample]], None] | None = None,
        borders: AllowedSources | None = None,
        running: RunningScore | None = None,
    ) -> None:
        """Keep the arguments; nothing is loaded here."""
        super().__init__()
        self._journal = journal
        self._spec = spec
        self._tasks = {task.config.task: task for task in tasks}
        self._progress = progress or (lambda finished, total: None)
        self._ranks = ranks or Ranks()
        self._complete = complete
        self._running = running
        self._answerer = Answerer(
            opened,
            spec.seed,
            lambda task, split, doc: self.task_dict[task][split][doc],
            self._source,
            partial(worded, spec.benchmark.text, self._tasks),
            spec.benchmark.needs_media,
            borders,
            spec.engine.kept,
        )
        #: Whether all processes answer each sample together, instead of dealing samples out.
        self._in_step = spec.model.parallel == "tensor"
        self._gave_up = False
        self.samples: dict[Key, Sample] = {}
        self.failures: list[Failure] = []
        size = spec.engine.batch_size
        #: 0 until the largest batch that fits is found.
        self.batch_size = 0 if size == "auto" else size
        self.seconds = 0.0
        self.ahead = batches_ahead(spec, self._ranks.local_world)
        #: The sum over all processes.
        self.reading = ReadingTimes()

    def generate_until(self, requests: Sequence[Instance]) -> list[GenerationResult]:
        """Answer all requests, in their order.

        Raises:
            SampleErrors: more samples failed than engine.max_errors allows, or none succeeded.
            UserError: every sample was refused; the first refusal.
            AllAnswered: in all processes but the first.
        """
        wanted = {key_of(request): request for request in requests}
        # Read once, before any process writes: all must deal out the same batches.
        entries = self._ranks.first(self._journal.entries)
        finished = finished_samples(entries)
        self.samples = {key: finished[key] for key in wanted if key in finished}
        self.resumed = len(self.samples)
        self._splits = {key: request.args[5] for key, request in wanted.items()}
        self._score(self.samples.values())
        groups = self._groups_of_run = self._groups(list(wanted.values()))
        if not self.batch_size:
            self.batch_size = journalled_batch_size(entries) or self._found_batch_size(groups)
        # A batch that an earlier process finished in part runs again as a whole: its composition, and so every bit of
        # its answers, is the same as in an uninterrupted run.
        pending = self._pending(
            groups, lambda block: any(key_of(request) not in self.samples for request in block)
        )
        self._answer_batches(pending if self._in_step else self._ranks.share(pending))
        self._exchange(len(wanted))
        if self._ranks.rank:
            raise AllAnswered
        for task in self._tasks.values():
            # lmms-eval scores only answered samples.
            task._instances = [
                request for request in task._instances if key_of(request) in self.samples
            ]
        first = next(request for key, request in wanted.items() if key in self.samples)
        #: The row's entry about prompts.
        self.prompt = self._answerer.opened.adapter.prompt_summary(self._answerer.chat(first))
        if self._complete is not None:
            self._complete(self.samples)
        return [self._result(key_of(request)) for request in requests]

    def answered(self) -> RequestGroup:
        """Return the answered requests of the largest group with equal settings."""
        group, members = max(self._groups_of_run, key=lambda item: len(item[1]))
        return group, [request for request in members if key_of(request) in self.samples]

    def encode(self, block: Sequence[Instance]) -> Mapping[str, Any]:
        """Return the model's inputs for a batch; any exception passes through."""
        return cast("Mapping[str, Any]", self._answerer.read(block).inputs)

    def _groups(self, requests: Sequence[Instance]) -> list[RequestGroup]:
        """Group requests by generation settings, each group in the original order."""
        groups: dict[str, RequestGroup] = {}
        for request in requests:
            wanted = settings_of(self._spec, request.args[2])
            groups.setdefault(repr(wanted), (wanted, []))[1].append(request)
        return list(groups.values())

    def _pending(
        self, groups: Sequence[RequestGroup], lacks: Callable[[Sequence[Instance]], bool]
    ) -> list[RequestGroup]:
        """Return the batches of all requests that lack an answer."""
        return [
            (group, block)
            for group, members in groups
            for start in range(0, len(members), self.batch_size)
            if lacks(block := members[start : start + self.batch_size])
        ]

    def _found_batch_size(self, groups: Sequence[RequestGroup]) -> int:
        """Return the largest size that fits in all processes, and journal it for the batches of a resumed run."""
        device, processes = self._spec.model.device, self._ranks.local_world
        size = min(self._ranks.gather(find_batch_size(self._answerer, groups, device, processes)))
        if self._ranks.rank == 0:
            self._journal.append({"batch_size": size})
        return size

    def _answer_batches(self, blocks: Sequence[RequestGroup]) -> None:
        """Answer the batches of this process and journal each with one append."""
        keys = self.samples.keys() | {key_of(request) for _, block in blocks for request in block}
        self._progress(len(self.samples) + len(self.failures), len(keys))
        for _ in range(self._spec.engine.warmup):
            for group, block in blocks[:1]:
                self._answerer.answer(block, group)
        # The warm-up is not part of the run.
        self._answerer.reading = ReadingTimes()
        batches = [block for _, block in blocks]
        with read_ahead(batches, self.ahead, self._answerer.preparer) as next_batch:
            for group, block in blocks:
                started = time.perf_counter()
                self._keep(*self._answerer.answer(block, group, next_batch))
                self.seconds += time.perf_counter() - started
                self._progress(len(self.samples) + len(self.failures), len(keys))
                self._gave_up = not self.samples and len(self.failures) >= HOPELESS
                if self._gave_up:
                    return

    def _keep(self, samples: Sequence[Sample], failures: Sequence[Failure]) -> None:
        """Journal new results with one append; only then do they count as finished."""
        samples = [sample for sample in samples if sample.key not in self.samples]
        failures = [failure for failure in failures if failure.key not in self.samples]
        if not self._in_step or self._ranks.rank == 0:
            self._journal.append(
                *(sample.entry() for sample in samples), *(failure.entry() for failure in failures)
            )
        self.samples |= {sample.key: sample for sample in samples}
        self.failures += failures
        self._score(samples)

    def _score(self, samples: Iterable[Sample]) -> None:
        """Add samples to the running score, if there is one."""
        if self._running is not None:
            self._running.add(
                samples,
                lambda sample: self.task_dict[sample.task][self._splits[sample.key]][sample.doc_id],
            )

    def _exchange(self, total: int) -> None:
        """Take over the results of all processes; raise if the run has failed."""
        # Samples from the journal come first, and all processes have them. The JSON form has no tensors, which would
        # need their device in the other process.
        fresh = [sample.entry() for sample in list(self.samples.values())[self.resumed :]]
        refusal, reading = self._answerer.refusal, self._answerer.reading
        parts = self._ranks.gather(
            (fresh, self.failures, refusal, self._gave_up, self.seconds, reading)
        )[: 1 if self._in_step else None]
        entries, failures, refusals, gave_up, seconds, readings = zip(*parts, strict=True)
        self.samples |= finished_samples(chain.from_iterable(entries))
        self.failures = sorted(chain.from_iterable(failures), key=lambda failure: failure.key)
        # The processes work at the same time.
        self.seconds, self.reading = max(seconds), sum(readings, ReadingTimes())
        first_refusal = next(filter(None, refusals), None)
        if not self.samples and first_refusal is not None:
            raise first_refusal
        if any(gave_up) or not self.samples or len(self.failures) > self._spec.engine.max_errors:
            raise SampleErrors(self.failures, total)

    def _result(self, key: Key) -> GenerationResult:
        if key not in self.samples:
            # Never scored, but lmms-eval pairs answers and requests by position.
            return GenerationResult(text="")
        sample = self.samples[key]
        counts = TokenCounts(input_tokens=sample.input_tokens, output_tokens=sample.output_tokens)
        return GenerationResult(text=sample.scored, token_counts=counts)

    def _source(self, task: str, split: str, doc_id: int, document: Any) -> tuple[str, Any]:
        config = self._tasks[task].config
        data = "/".join(filter(None, (config.dataset_path, config.dataset_name, split)))
        return f"{data}/{doc_id}", self._tasks[task].doc_to_target(document)

    def clean(self) -> None:
        """Keep the model; the base method deletes every module of the instance."""

    def loglikelihood(self, requests: Sequence[Instance]) -> Any:
        """Raise NotImplementedError: answers are generated, not scored by likelihood."""
        raise NotImplementedError("loglikelihood tasks are not supported, only generate_until")

    def generate_until_multi_round(self, requests: Sequence[Instance]) -> Any:
        """Raise NotImplementedError: a sample has one round."""
        raise NotImplementedError("multi-round tasks are not supported, only generate_until")


@dataclass(frozen=True)
class RepeatedAnswer:
    """A sample that was answered once more, and its chat."""

    sample: Sample
    chat: Chat


class _Repeater(ChatModel):
    """Answers only the wanted samples, one at a time, and ends before anything is scored."""

    def __init__(self, *arguments: Any, wanted: Collection[Key]) -> None:
        super().__init__(*arguments)
        self._wanted = wanted
        self.repeated: list[RepeatedAnswer] = []

    def generate_until(self, requests: Sequence[Instance]) -> list[GenerationResult]:
        """Answer the wanted samples.

        Raises:
            SampleErrors: a sample failed.
            AllAnswered: always, at the end.
        """
        wanted = [request for request in requests if key_of(request) in self._wanted]
        for group, members in self._groups(wanted):
            for request in members:
                samples, failures = self._answerer.answer([request], group)
                if failures:
                    raise SampleErrors(failures, len(wanted))
                self.repeated.append(RepeatedAnswer(samples[0], self._answerer.chat(request)))
        raise AllAnswered


def answer_again(
    spec: RunSpec, opened: OpenMethod, loaded: LoadedBenchmark, keys: Collection[Key]
) -> list[RepeatedAnswer]:
    """Answer the samples `keys` of an open benchmark by an open method, in the order of the benchmark.

    Each is its own batch, so rounding may differ from a run with larger batches.

    Raises:
        SampleErrors: a sample failed.
    """
    # Nothing is journalled.
    arguments = (opened, None, spec, loaded.tasks, None, None, None, loaded.borders)
    model = _Repeater(*arguments, wanted=frozenset(keys))
    with scoring(loaded), suppress(AllAnswered):
        simple_evaluate(model=model, **loaded.arguments(spec))
    return sorted(model.repeated, key=lambda repeated: repeated.sample.key)
