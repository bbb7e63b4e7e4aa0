"""A stand-in for model and engine with answers that a test states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lmms_eval.api.task import Task

from espalier.harness.engine.record import GeneratedBatch, SampleRecord
from tests.arithmetic import StandIn
from tests.benchmarks.fixtures import Answer


@dataclass
class AnsweringModel(StandIn):
    """Adapter and session in one: answers each document with what a function of the document says.

    Attributes:
        tasks: the tasks that hold the documents.
        answer: returns the answer of a document.
        chats: the chat of each answered sample, by `task/doc id`.
    """

    tasks: Sequence[Task]
    answer: Answer
    chats: dict[str, Any] = field(default_factory=dict)
    _answers: list[str] = field(default_factory=list)

    def encode(self, messages: Sequence[Any]) -> Mapping[str, Any]:
        """Keep the chats."""
        return {"chats": list(messages)}

    def prompt_summary(self, chat: Any) -> dict[str, str | None]:
        """Say what a row says of prompts."""
        return {"rendered": str(chat)}

    def generate(
        self, inputs: Mapping[str, Any], samples: Sequence[str], **more: Any
    ) -> GeneratedBatch:
        """Look the documents up and note what to say."""
        first = len(self._answers)
        self.chats |= dict(zip(samples, inputs["chats"], strict=True))
        self._answers += [self.answer(self._document(name)) for name in samples]
        return GeneratedBatch(
            ids=torch.arange(first, len(self._answers))[:, None],
            records=tuple(_record(name) for name in samples),
        )

    def decode(self, ids: torch.Tensor) -> list[str]:
        """Say it."""
        return [self._answers[int(row[0])] for row in ids]

    def _document(self, name: str) -> Mapping[str, Any]:
        task_name, _, number = name.rpartition("/")
        task = next(entry for entry in self.tasks if entry.config.task == task_name)
        docs = task.test_docs() if task.has_test_docs() else task.validation_docs()
        return dict(docs[int(number)])


def _record(name: str) -> SampleRecord:
    return SampleRecord(
        sample=name,
        visual=6,
        text=4,
        requested=(6,),
        kept=(6,),
        entering=(6,),
        kv_entries=10,
        kv_bytes=100,
        new_tokens=1,
        times_ms={"vision": 1.0, "select": 0.5, "prefill": 2.0, "decode_per_token": 0.25},
    )
