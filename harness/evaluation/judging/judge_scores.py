"""Numbers out of what a judge says. A text that holds none, or too many, is no verdict: it is never a score of zero."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: What some models write before they answer.
_THOUGHT = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL)
#: A number by itself: not a part of a word, of a date or of another number.
_NUMBER = re.compile(r"(?<![\w.-])-?\d+(?:\.\d+)?(?![\w-]|\.\d)")


def numbers(text: str) -> list[float]:
    """Return the numbers of a text in their order."""
    return [float(number) for number in _NUMBER.findall(text)]


def single(text: str, lowest: float, highest: float, integral: bool = False) -> float | None:
    """Return the only number that a verdict holds, None unless there is one and it is in range.

    Args:
        text: what the judge said.
        lowest: the smallest score.
        highest: the largest.
        integral: whether only whole numbers are scores.
    """
    scores = numbers(_THOUGHT.sub(" ", text))
    if len(scores) != 1 or not _fit(scores, lowest, highest) or (integral and scores[0] % 1):
        return None
    return scores[0]


def pair(text: str, lowest: float, highest: float) -> tuple[float, float] | None:
    """Return the two numbers of the first line that says anything, None unless there are two and both are in range."""
    lines = [line for line in _THOUGHT.sub(" ", text).splitlines() if line.strip()]
    scores = numbers(lines[0]) if lines else []
    return (scores[0], scores[1]) if len(scores) == 2 and _fit(scores, lowest, highest) else None


def _fit(scores: Sequence[float], lowest: float, highest: float) -> bool:
    return all(lowest <= number <= highest for number in scores)
