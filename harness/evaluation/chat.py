"""The model that lmms-eval sees: requests in, answers out, through the engine and the journal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.api.task import Task
from lmms_eval.protocol import ChatMessages

from harness.config.spec import RunSpec
from harness.errors import UserError
from harness.evaluation.generation import Settings, cut, settings
from harness.evaluation.samples import Failure, Journal, Key, Sample, SampleErrors, finished
from methods.base import MethodError

log = logging.getLogger(__name__)

#: Called with (finished samples, all samples) at the start and after each batch.
Progress = Callable[[int, int], None]

#: When the first so many samples all fail, the run is broken, not a sample; the rest is not tried.
HOPELESS = 16


class ChatModel(lmms):
    """Answers requests in batches, journals each answer, and never computes one that is there.

    Args:
        adapter: encodes chats and decodes ids (harness/adapters).
        session: the open engine session that generates.
        journal: finished samples of this run.
        spec: batch size, warm-up, error allowance, generation settings and seed.
        tasks: the tasks whose requests will come; failed samples are withdrawn from them.
        progress: told how far the run is.
    """

    is_simple = False

    def __init__(
        self,
        adapter: Any,
        session: Any,
        journal: Journal,
        spec: RunSpec,
        tasks: Sequence[Task],
        progress: Progress | None = None,
    ) -> None:
        """Take everything that answering needs; nothing is loaded here."""
        super().__init__()
        self._adapter = adapter
        self._session = session
        self._journal = journal
        self._spec = spec
        self._tasks = {task.config.task: task for task in tasks}
        self._progress = progress
        self.samples: dict[Key, Sample] = {}
        self.failures: list[Failure] = []
        self.resumed = 0
        self.seconds = 0.0
        self._refusal: Exception | None = None

    def generate_until(self, requests: Sequence[Instance]) -> list[GenerationResult]:
        """Answer all requests, in their order.

        Raises:
            SampleErrors: more samples failed than engine.max_errors allows, or none succeeded.
            UserError, MethodError: every sample was refused for the same kind of reason.
        """
        wanted = {_key(request): request for request in requests}
        done = finished(self._journal.entries())
        self.samples = {key: done[key] for key in wanted if key in done}
        self.resumed = len(self.samples)
        self._report(len(wanted))
        warmup = self._spec.engine.warmup
        for group, members in self._groups(list(wanted.values())):
            size = self._spec.engine.batch_size
            for start in range(0, len(members), size):
                # A batch that an earlier process finished in part is run again as a whole: its
                # composition, and so every bit of its answers, is the same as without a break.
                block = members[start : start + size]
                if all(_key(request) in self.samples for request in block):
                    continue
                for _ in range(int(warmup)):
                    self._attempt(block, group)
                warmup = 0
                started = time.perf_counter()
                self._keep(*self._attempt(block, group))
                self.seconds += time.perf_counter() - started
                self._report(len(wanted))
                if not self.samples and len(self.failures) >= HOPELESS:
                    raise self._refusal or SampleErrors(self.failures, len(wanted))
        if not self.samples and self._refusal:
            raise self._refusal
        if len(self.failures) > self._spec.engine.max_errors or not self.samples:
            raise SampleErrors(self.failures, len(wanted))
        self._withdraw_failed()
        return [self._result(_key(request)) for request in requests]

    def _groups(self, requests: Sequence[Instance]) -> list[tuple[Settings, list[Instance]]]:
        """Collect requests with equal generation settings, each group in the original order."""
        groups: list[tuple[Settings, list[Instance]]] = []
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

    def _attempt(
        self, block: Sequence[Instance], group: Settings
    ) -> tuple[list[Sample], list[Failure]]:
        """Answer a batch; if it raises, answer its samples one by one to find those to blame."""
        try:
            return self._answer(block, group), []
        except (Exception, SystemExit) as error:
            # Anything can go wrong with one sample (its file, its size, memory), and some tasks
            # even call sys.exit.
            log.debug("batch of %d failed", len(block), exc_info=True)
            if len(block) == 1:
                if isinstance(error, UserError | MethodError):
                    self._refusal = self._refusal or error
                return [], [Failure.from_exception(_key(block[0]), error)]
        # Outside the handler: the tensors that the traceback held are free before the next try.
        parts = [self._attempt([request], group) for request in block]
        return [s for samples, _ in parts for s in samples], [f for _, bad in parts for f in bad]

    def _answer(self, block: Sequence[Instance], group: Settings) -> list[Sample]:
        keys = [_key(request) for request in block]
        inputs = self._adapter.encode([self._messages(request) for request in block])
        names = [f"{task}/{doc_id}" for task, doc_id in keys]
        if group.generate["do_sample"]:
            # `generate` samples from torch's global generator: seed it by batch, leave no trace.
            with torch.random.fork_rng():
                torch.manual_seed(self._spec.seed * 1_000_003 + keys[0][1])
                generated = self._session.generate(inputs, names, **group.generate)
        else:
            generated = self._session.generate(inputs, names, **group.generate)
        texts = self._adapter.decode(generated.ids)
        return [
            Sample(
                task=key[0],
                doc_id=key[1],
                answer=cut(text, group.until),
                input_tokens=record.visual + record.text,
                output_tokens=record.new_tokens,
                record=record,
            )
            for key, text, record in zip(keys, texts, generated.records, strict=True)
        ]

    def _messages(self, request: Instance) -> list[dict[str, Any]]:
        _, to_messages, _, doc_id, task, split = request.args
        messages = to_messages(self.task_dict[task][split][doc_id])
        chat: list[dict[str, Any]] = ChatMessages(messages=messages).to_hf_messages()
        return chat

    def _keep(self, samples: Sequence[Sample], failures: Sequence[Failure]) -> None:
        """Write what is new to the journal, in one append, before it counts as finished."""
        samples = [one for one in samples if one.key not in self.samples]
        failures = [one for one in failures if one.key not in self.samples]
        self._journal.append(*(s.entry() for s in samples), *(f.entry() for f in failures))
        self.samples |= {one.key: one for one in samples}
        self.failures += failures

    def _withdraw_failed(self) -> None:
        """Take failed samples out of their tasks: lmms-eval scores only what was answered."""
        failed = {failure.key for failure in self.failures}
        for task in self._tasks.values():
            task._instances = [one for one in task._instances if _key(one) not in failed]

    def _result(self, key: Key) -> GenerationResult:
        if key not in self.samples:
            # Withdrawn from its task, so never scored; answers and requests must still pair up.
            return GenerationResult(text="")
        sample = self.samples[key]
        counts = TokenCounts(input_tokens=sample.input_tokens, output_tokens=sample.output_tokens)
        return GenerationResult(text=sample.answer, token_counts=counts)

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


def _key(request: Instance) -> Key:
    """Chat requests carry (context, to_messages, settings, doc id, task, split)."""
    return (request.args[4], int(request.args[3]))
