"""MMBench by rule: which letter an answer names, and when a question is answered. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmms_eval.tasks._task_utils.mcq_extract import extract_mcq_answer
from lmms_eval.tasks.mmbench.mmbench_evals import MMBench_Evaluator

#: A question's rotations have its own number and a multiple of this more.
ROTATION = 1_000_000


def letter(item: Mapping[str, Any]) -> str:
    """Return the option that an answer names, "" if none.

    The rules of lmms-eval's static evaluation: a letter by itself, then the text of one option, then the most likely
    place of a letter. Nothing is asked of a language model and nothing is drawn.

    Args:
        item: the options under `A` to `D`, missing ones None or NaN, and the answer under `prediction`.
    """
    rules = MMBench_Evaluator()
    choices = sorted(rules.build_choices(item))
    named = rules.prefetch_answer(item) or extract_mcq_answer(item["prediction"], choices=choices)
    return named or ""


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
