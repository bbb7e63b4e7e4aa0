"""Scores in a judge's text. A text with too few or too many numbers is not a verdict, and not a score of zero."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Reasoning that some models write before they answer.
_THOUGHT = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL)
#: A separate number: not part of a word, a date or another number.
_NUMBER = re.compile(r"(?<![\w.-])-?\d+(?:\.\d+)?(?![\w-]|\.\d)")


def numbers(text: str) -> list[float]:
    """Return the numbers of a text in order."""
    return [float(number) for number in _NUMBER.findall(text)]


def single(text: str, lowest: float, highest: float, integral: bool = False) -> float | None:
    """Return the only number in a verdict; None unless there is exactly one, in range.

    Args:
        text: the judge's text.
        lowest: the smallest score.
        highest: the largest.
        integral: whether a score must be an integer.
    """
    scores = numbers(_THOUGHT.sub(" ", text))
    if len(scores) != 1 or not _fit(scores, lowest, highest) or (integral and scores[0] % 1):
        return None
    return scores[0]


def pair(text: str, lowest: float, highest: float) -> tuple[float, float] | None:
    """Return the two numbers of the first nonempty line; None unless there are exactly two, both in range."""
    lines = [line for line in _THOUGHT.sub(" ", text).splitlines() if line.strip()]
    scores = numbers(lines[0]) if lines else []
    return (scores[0], scores[1]) if len(scores) == 2 and _fit(scores, lowest, highest) else None


def _fit(scores: Sequence[float], lowest: float, highest: float) -> bool:
    return all(lowest <= number <= highest for number in scores)
