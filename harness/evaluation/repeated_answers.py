"""Answer chosen samples of a benchmark once more, outside of a run, with the chats that the model was given."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lmms_eval.api.instance import GenerationResult, Instance
from lmms_eval.evaluator import simple_evaluate

from espalier.harness.evaluation.batch_answers import key_of
from espalier.harness.evaluation.chat_model import AllAnswered, ChatModel
from espalier.harness.evaluation.lmms_tasks import LoadedBenchmark, scoring
from espalier.harness.evaluation.samples import Key, Sample, SampleErrors
from espalier.harness.kinds.kind import OpenMethod
from espalier.harness.models.chat_media import Chat
from espalier.harness.specs.run_spec import RunSpec


@dataclass(frozen=True)
class RepeatedAnswer:
    """A sample that was answered once more, and its chat."""

    sample: Sample
    chat: Chat


class NoJournal:
    """Implements AnswerJournal for answers that are not stored."""

    def append(self, *entries: Any) -> None:
        """Store nothing."""

    def entries(self) -> Sequence[Any]:
        """Return nothing."""
        return ()


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
    arguments = (opened, NoJournal(), spec, loaded.tasks, None, None, None, loaded.borders)
    model = _Repeater(*arguments, wanted=frozenset(keys))
    with scoring(loaded), suppress(AllAnswered):
        simple_evaluate(model=model, **loaded.arguments(spec))
    return sorted(model.repeated, key=lambda repeated: repeated.sample.key)
