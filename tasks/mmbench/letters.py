"""MMBench by rule: the letter of an answer, and the score of a question. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from espalier.harness.evaluation.scoring.choices import letter, lettered

#: Rotations of a question have its number plus a multiple of this.
ROTATION = 1_000_000


def letter_of(item: Mapping[str, Any]) -> str:
    """Return the option that an answer states, "" if none.

    Args:
        item: the options under `A` to `D`, missing ones None or NaN, and the answer under `prediction`.
    """
    return letter(item["prediction"], lettered(item[option] for option in "ABCD"))


def share_of_questions(samples: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of questions that are answered right in every rotation of their options.

    Args:
        samples: each with its `index` and whether it is `right`. Rotations without their question, as under a limit,
            are ignored.
    """
    right: dict[int, bool] = {}
    questions = set()
    for sample in samples:
        question = sample["index"] % ROTATION
        right[question] = right.get(question, True) and sample["right"]
        if sample["index"] < ROTATION:
            questions.add(question)
    return (
        sum(right[question] for question in questions) / len(questions)
        if questions
        else float("nan")
    )
