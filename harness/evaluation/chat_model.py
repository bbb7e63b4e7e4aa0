"""The model that lmms-eval sees: requests in, answers out, through the engine and the journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.api.task import Task

from espalier.harness.errors import UserError
from espalier.harness.evaluation.auto_batch import (
    LARGEST,
    RealTrial,
    largest_batch,
    remembered,
    widest,
)
from espalier.harness.evaluation.batch_answers import Answerer, key_of
from espalier.harness.evaluation.data_sources import Borders
from espalier.harness.evaluation.prefetch import Reading, fed, look_ahead
from espalier.harness.evaluation.prompt_text import Wording
from espalier.harness.evaluation.samples import (
    Failure,
    Journal,
    Key,
    Sample,
    SampleErrors,
    finished,
)
from espalier.harness.kinds.kind import Responder
from espalier.harness.ranks import Ranks
from espalier.harness.specs.generation import Settings, settings
from espalier.harness.specs.run_spec import RunSpec

#: Called with (finished samples, all samples) at the start and after each batch.
Progress = Callable[[int, int], None]

#: When the first so many samples all fail, the run is broken, not a sample; the rest is not tried.
HOPELESS = 16

#: Requests with equal generation settings: all of a run, or those of one batch.
Group = tuple[Settings, list[Instance]]


class Answered(Exception):
    """Everything is answered and known to rank 0, which goes on to score; this process has nothing more to do."""


@dataclass(frozen=True)
class Part:
    """What one process, or all together, made of its batches.

    Attributes:
        entries: new answers, as the journal has them.
        failures: samples that raised.
        refusal: the first of them that cannot work at all.
        gave_up: whether batches were left out because nothing succeeded.
        seconds: wall time; of several processes the longest.
        reading: what reading and preprocessing took of it, of several processes together.
    """

    entries: list[dict[str, Any]]
    failures: list[Failure]
    refusal: UserError | None
    gave_up: bool
    seconds: float
    reading: Reading


class ChatModel(lmms):
    """Answers requests in batches, journals each answer, and never computes one that is there.

    Args:
        responder: what answers, already open.
        journal: finished samples of this run.
        spec: batch size, warm-up, error allowance, generation settings and seed.
        tasks: the tasks whose requests will come; failed samples are withdrawn from them.
        progress: told how far this process is.
        complete: called in rank 0 with all answers, which are in the journal, before any is scored.
        ranks: the processes that share the work. lmms-eval is not told of them: each gets all requests, and the
            batches, the same as one process would form, are dealt out here.
        borders: where media may come from; None: from anywhere.
    """

    is_simple = False

    def __init__(
        self,
        responder: Responder,
        journal: Journal,
        spec: RunSpec,
        tasks: Sequence[Task],
        progress: Progress | None = None,
        ranks: Ranks | None = None,
        complete: Callable[[Mapping[Key, Sample]], None] | None = None,
        borders: Borders | None = None,
    ) -> None:
        """Take everything that answering needs; nothing is loaded here."""
        super().__init__()
        self._journal = journal
        self._spec = spec
        self._tasks = {task.config.task: task for task in tasks}
        self._progress = progress
        self._ranks = ranks or Ranks()
        self._complete = complete
        self._answerer = Answerer(
            responder,
            spec.seed,
            lambda task, split, doc: self.task_dict[task][split][doc],
            self._source,
            Wording(spec.benchmark.text, self._tasks),
            spec.benchmark.needs_media,
            borders,
        )
        self._gave_up = False
        self._asked: list[Group] = []
        self.samples: dict[Key, Sample] = {}
        self.failures: list[Failure] = []
        size = spec.engine.batch_size
        #: 0 until the largest batch that fits is found.
        self.batch_size = 0 if size == "auto" else size
        self.resumed = 0
        self.seconds = 0.0
        self.ahead = look_ahead(spec, self._ranks.local_world)
        #: Of all processes together.
        self.reading = Reading()
        #: What the row says of prompts, by the example of the first answered sample.
        self.prompt: dict[str, str | None] = {}

    def generate_until(self, requests: Sequence[Instance]) -> list[GenerationResult]:
        """Answer all requests, in their order.

        Raises:
            SampleErrors: more samples failed than engine.max_errors allows, or none succeeded.
            UserError: every sample was refused; the first refusal.
            Answered: in all processes but the first.
        """
        wanted = {key_of(request): request for request in requests}
        # Read once, before anybody writes: all must deal out the same batches.
        entries = self._ranks.first(self._journal.entries)
        done = finished(entries)
        self.samples = {key: done[key] for key in wanted if key in done}
        self.resumed = len(self.samples)
        groups = self._asked = self._groups(list(wanted.values()))
        if not self.batch_size:
            self.batch_size = remembered(entries) or self._find_batch_size(groups)
        self._answer(self._ranks.share(self._pending(groups)))
        self._take(self._exchange(), len(wanted))
        if self._ranks.rank:
            raise Answered
        self._withdraw_failed()
        first = next(request for key, request in wanted.items() if key in self.samples)
        self.prompt = self._answerer.told(first)
        if self._complete is not None:
            self._complete(self.samples)
        return [self._result(key_of(request)) for request in requests]

    def answered(self) -> Group:
        """Return the largest group of requests with equal settings, those that were answered."""
        group, members = max(self._asked, key=lambda one: len(one[1]))
        return group, [one for one in members if key_of(one) in self.samples]

    def encode(self, block: Sequence[Instance]) -> Mapping[str, Any]:
        """Return the model's inputs of a batch; raises whatever goes wrong."""
        return self._answerer.encode(block)

    def _groups(self, requests: Sequence[Instance]) -> list[Group]:
        """Collect requests with equal generation settings, each group in the original order."""
        groups: list[Group] = []
        for request in requests:
            asked = settings(
                request.args[2], self._spec.model.generation, self._spec.benchmark.generation
            )
            for known, members in groups:
                if known == asked:
                    members.append(request)
                    break
            else:
                groups.append((asked, [request]))
        return groups

    def _pending(self, groups: Sequence[Group]) -> list[Group]:
        """Return the batches that have an unanswered sample.

        One that an earlier process finished in part is run again as a whole: its composition, and so every bit of its
        answers, is the same as without a break.
        """
        return [
            (group, block)
            for group, block in self._blocks(groups)
            if any(key_of(request) not in self.samples for request in block)
        ]

    def _blocks(self, groups: Sequence[Group]) -> list[Group]:
        """Return the batches of all requests."""
        return [
            (group, members[start : start + self.batch_size])
            for group, members in groups
            for start in range(0, len(members), self.batch_size)
        ]

    def _find_batch_size(self, groups: Sequence[Group]) -> int:
        """Search, agree on what fits everywhere, and write it down: a resumed run must form the same batches."""
        group, members = widest(groups)
        trial = RealTrial(
            self._answerer, members, group, self._spec.model.device, self._ranks.local_world
        )
        size = largest_batch(trial, min(LARGEST, len(members)))
        trial.close()
        size = min(self._ranks.gather(size))
        if self._ranks.rank == 0:
            self._journal.append({"batch_size": size})
        return size

    def _answer(self, blocks: Sequence[Group]) -> None:
        """Answer this process's batches and journal them, one append each."""
        mine = self.samples.keys() | {key_of(one) for _, block in blocks for one in block}
        self._report(len(mine))
        for _ in range(self._spec.engine.warmup):
            for group, block in blocks[:1]:
                self._answerer.attempt(block, group)
        # What came before, warming up, is not of the run.
        self._answerer.reading = Reading()
        batches = [block for _, block in blocks]
        with fed(batches, self.ahead, self._answerer.preparer) as given:
            for group, block in blocks:
                started = time.perf_counter()
                self._keep(*self._answerer.attempt(block, group, given))
                self.seconds += time.perf_counter() - started
                self._report(len(mine))
                self._gave_up = not self.samples and len(self.failures) >= HOPELESS
                if self._gave_up:
                    return

    def _keep(self, samples: Sequence[Sample], failures: Sequence[Failure]) -> None:
        """Write what is new to the journal, in one append, before it counts as finished."""
        samples = [one for one in samples if one.key not in self.samples]
        failures = [one for one in failures if one.key not in self.samples]
        self._journal.append(*(s.entry() for s in samples), *(f.entry() for f in failures))
        self.samples |= {one.key: one for one in samples}
        self.failures += failures

    def _exchange(self) -> Part:
        """Tell all processes what each of them answered; return what they say together."""
        # Those from the journal come first and are known to all. The journal's form leaves out the tensors of the
        # records, which would bring their device along.
        fresh = [sample.entry() for sample in list(self.samples.values())[self.resumed :]]
        answerer, seconds = self._answerer, self.seconds
        refusal, reading = answerer.refusal, answerer.reading
        own = Part(fresh, self.failures, refusal, self._gave_up, seconds, reading)
        parts = self._ranks.gather(own)
        return Part(
            entries=[entry for part in parts for entry in part.entries],
            failures=sorted((f for part in parts for f in part.failures), key=lambda f: f.key),
            refusal=next((part.refusal for part in parts if part.refusal is not None), None),
            gave_up=any(part.gave_up for part in parts),
            seconds=max(part.seconds for part in parts),
            reading=sum((part.reading for part in parts), Reading()),
        )

    def _take(self, whole: Part, total: int) -> None:
        """Make the answers of all processes this model's own, or raise if the run has failed."""
        self.samples |= finished(whole.entries)
        self.failures, self.seconds, self.reading = whole.failures, whole.seconds, whole.reading
        if not self.samples and whole.refusal is not None:
            raise whole.refusal
        allowed = self._spec.engine.max_errors
        if whole.gave_up or not self.samples or len(self.failures) > allowed:
            raise SampleErrors(self.failures, total)

    def _withdraw_failed(self) -> None:
        """Take failed samples out of their tasks: lmms-eval scores only what was answered."""
        failed = {failure.key for failure in self.failures}
        for task in self._tasks.values():
            task._instances = [one for one in task._instances if key_of(one) not in failed]

    def _result(self, key: Key) -> GenerationResult:
        if any(failure.key == key for failure in self.failures):
            # Withdrawn from its task, so never scored; answers and requests must still pair up.
            return GenerationResult(text="")
        sample = self.samples[key]
        counts = TokenCounts(input_tokens=sample.input_tokens, output_tokens=sample.output_tokens)
        return GenerationResult(text=sample.scored, token_counts=counts)

    def _source(self, task: str, split: str, doc_id: int, document: Any) -> tuple[str, Any]:
        config = self._tasks[task].config
        data = "/".join(filter(None, (config.dataset_path, config.dataset_name, split)))
        return f"{data}/{doc_id}", self._tasks[task].doc_to_target(document)

    def _report(self, total: int) -> None:
        if self._progress is not None:
            self._progress(len(self.samples) + len(self.failures), total)

    def clean(self) -> None:
        """Keep the model: lmms-eval's own `clean` deletes every module held by the instance."""

    def loglikelihood(self, requests: Sequence[Instance]) -> Any:
        """Refuse: answers are generated, never scored by likelihood."""
        raise NotImplementedError("loglikelihood tasks are not supported, only generate_until")

    def generate_until_multi_round(self, requests: Sequence[Instance]) -> Any:
        """Refuse: one round a sample."""
        raise NotImplementedError("multi-round tasks are not supported, only generate_until")
