"""What a batch of requests becomes: its random numbers, if the run samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image

from espalier.harness.engine.record import GeneratedBatch
from espalier.harness.evaluation.batch_answers import Answerer
from espalier.harness.specs.generation import Settings
from tests.arithmetic import Calculator


class Drawing(Calculator):
    """A calculator that notes the next random number of each call, as `generate` would draw it."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[float] = []

    def generate(self, inputs: Any, samples: Sequence[str], **settings: Any) -> GeneratedBatch:
        self.numbers.append(torch.rand(1).item())
        return super().generate(inputs, samples)


def request(doc_id: int) -> Any:
    """A chat request; its chat is written by the document."""

    def to_messages(doc: Mapping[str, Any]) -> list[dict[str, Any]]:
        image = {"type": "image", "url": Image.new("RGB", (4, 4))}
        return [{"role": "user", "content": [image, {"type": "text", "text": doc["question"]}]}]

    return SimpleNamespace(args=("", to_messages, {}, doc_id, "sums", "test"))


def drawn(seed: int, *batches: Sequence[int]) -> list[float]:
    """Answer batches of documents and return the number that each batch drew first."""
    session = Drawing()
    answerer = Answerer(session, seed, lambda task, split, doc: {"question": f"{doc}+1"})
    group = Settings({"do_sample": True}, ())
    for batch in batches:
        answerer.answer([request(doc_id) for doc_id in batch], group)
    return session.numbers


def test_a_batch_draws_by_the_runs_seed_and_its_first_sample() -> None:
    first, second = drawn(0, [0, 1], [2, 3])
    assert first != second
    assert drawn(0, [2, 3]) == [second]  # a resumed run goes on as a whole one
    assert drawn(1, [0, 1])[0] not in (first, second)
    # No seed repeats another's numbers a few documents on.
    tables = [drawn(seed, *([doc] for doc in range(8))) for seed in range(4)]
    assert len({number for table in tables for number in table}) == 32


def test_answering_leaves_the_callers_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = torch.rand(1)
    drawn(7, [0])
    assert torch.equal(torch.cat([first, torch.rand(2)]), expected)
