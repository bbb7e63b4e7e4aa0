"""MMBench by rule: which letter an answer states, and when a question is answered. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from espalier.harness.evaluation.scoring.choices import letter, lettered

#: A question's rotations have its own number and a multiple of this more.
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
        samples: each with its `index` and whether it is `right`. Rotations of a question that is not among them count
            for nothing, as under a limit.
    """
    right: dict[int, bool] = {}
    asked = set()
    for one in samples:
        question = one["index"] % ROTATION
        right[question] = right.get(question, True) and one["right"]
        if one["index"] < ROTATION:
            asked.add(question)
    return sum(right[one] for one in asked) / len(asked) if asked else float("nan")
