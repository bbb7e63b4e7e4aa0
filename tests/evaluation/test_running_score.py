"""The running score of a run: a mean of the answers so far, or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from espalier.harness.evaluation import stated_answers
from espalier.harness.evaluation.stated_answers import RunningScore

ANSWERS = ("right", "wrong", "right", "broken", "right")


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch) -> RunningScore:
    class Task:
        config = SimpleNamespace(task="t")

        def process_results(self, document: str, results: list[str]) -> dict[str, float]:
            if results == ["broken"]:
                raise KeyError(document)
            return {"acc": float(results == ["right"])}

    monkeypatch.setattr(stated_answers, "strict_scoring", lambda process, answers: process)
    benchmark: Any = SimpleNamespace(needs=(), headline="acc", answers=None)
    tasks: Any = [Task()]
    return RunningScore(tasks, benchmark)


def samples(*answers: str) -> list[Any]:
    return [
        SimpleNamespace(task="t", key=("t", number), scored=answer)
        for number, answer in enumerate(answers)
    ]


def test_it_is_the_mean_of_the_answers_until_one_cannot_be_scored(score: RunningScore) -> None:
    assert score.value is None
    for answers, value in (
        (("right",), 1),
        (("right", "wrong"), 0.5),
        (ANSWERS, None),
        (("right",), None),
    ):
        score.add(samples(*answers), str)
        assert score.value == value
