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


def single(text: str, least: float, most: float, whole: bool = False) -> float | None:
    """Return the only number that a verdict holds, None unless there is one and it is in range.

    Args:
        text: what the judge said.
        least: the smallest score.
        most: the largest.
        whole: whether only whole numbers are scores.
    """
    found = numbers(_THOUGHT.sub(" ", text))
    if len(found) != 1 or not _fit(found, least, most) or (whole and found[0] % 1):
        return None
    return found[0]


def pair(text: str, least: float, most: float) -> tuple[float, float] | None:
    """Return the two numbers of the first line that says anything, None unless there are two and both are in range."""
    lines = [line for line in _THOUGHT.sub(" ", text).splitlines() if line.strip()]
    found = numbers(lines[0]) if lines else []
    return (found[0], found[1]) if len(found) == 2 and _fit(found, least, most) else None


def _fit(found: Sequence[float], least: float, most: float) -> bool:
    return all(least <= number <= most for number in found)
