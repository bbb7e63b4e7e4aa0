"""Scores of answers: pure functions of strings; a malformed answer scores zero and never raises."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rapidfuzz.distance import Levenshtein

from espalier.harness.seedling.scenes import BOX, COLOUR_NAMES, SceneObject
from espalier.harness.seedling.sprites import SHAPES
from espalier.harness.seedling.vocabulary import BIN, locations, parse_box

CLOSE = 2 * BIN
"""Maximum distance in pixels, along both axes, of a close centre in a caption."""

_COLOURS = "|".join(COLOUR_NAMES)
_SHAPES = "|".join(SHAPES)
_PART = re.compile(rf"\b({_COLOURS})\s+(?:frame\s+with\s+digit\s+(\d)|({_SHAPES}))\b([^;]*)")


def words(answer: str) -> list[str]:
    """Return the lower-case words of an answer, without punctuation at their ends."""
    stripped = (word.strip(".,;:!?\"'") for word in str(answer).lower().split())
    return [word for word in stripped if word]


def exact_match(answer: str, truth: str) -> float:
    """Return 1.0 if the words of the answer are those of the truth."""
    return float(words(answer) == words(truth))


def is_one_of(answer: str, allowed: Sequence[str]) -> bool:
    """Return whether the answer is one word of a closed list."""
    tokens = words(answer)
    return len(tokens) == 1 and tokens[0] in allowed


def yes_or_no(answer: str) -> str:
    """Return "yes" or "no" if it is the first word; else ""."""
    first = words(answer)[:1]
    return first[0] if first and first[0] in ("yes", "no") else ""


def iou(first: BOX, second: BOX) -> float:
    """Return the intersection over union of two boxes; inverted boxes have no area."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    shared = max(width, 0) * max(height, 0)
    union = _area(first) + _area(second) - shared
    return shared / union if union > 0 else 0.0


def _area(box: BOX) -> int:
    return max(box[2] - box[0], 0) * max(box[3] - box[1], 0)


def box_score(answer: str, truth: BOX) -> tuple[float, bool]:
    """Return the IoU of an answered box with the true box, and whether the answer was a box."""
    box = parse_box(str(answer))
    return (iou(box, truth), True) if box else (0.0, False)


def reading_score(answer: str, truth: str) -> float:
    """Return 1 minus the edit distance over words, normalised by the longer text.

    Words, not characters, since answers are single digits separated by spaces.
    """
    answer_words, truth_words = words(answer), words(truth)
    longest = max(len(answer_words), len(truth_words))
    return 1 - Levenshtein.distance(answer_words, truth_words) / longest if longest else 1.0


@dataclass(frozen=True)
class CaptionScore:
    """Scores of one caption, all in 0..1.

    Attributes:
        recall: Share of the objects named with correct colour and kind or digit.
        precision: Share of the named objects that are correct; repeats are wrong.
        close: Share of all objects that are named correctly and placed close to their centre.
        parsed: Whether the answer names any object.
    """

    recall: float
    precision: float
    close: float
    parsed: bool


def caption_score(answer: str, objects: Sequence[SceneObject]) -> CaptionScore:
    """Return the scores of a caption, compared with the objects of its scene."""
    missing = {(item.colour, item.name): item for item in objects}
    mentions = right = close = 0
    for colour, digit, shape, tail in _PART.findall(str(answer).lower()):
        mentions += 1
        item = missing.pop((colour, digit or shape), None)
        if item is None:
            continue
        right += 1
        close += _is_close(tail, item.box)
    if not mentions:
        return CaptionScore(0.0, 0.0, 0.0, False)
    total = max(len(objects), 1)
    return CaptionScore(right / total, right / mentions, close / total, True)


def _is_close(text: str, box: BOX) -> bool:
    place = locations(text)
    if len(place) != 2:
        return False
    centre = ((box[0] + box[2]) // 2, (box[1] + box[3]) // 2)
    return all(abs(p * BIN + 1 - c) <= CLOSE for p, c in zip(place, centre, strict=True))
