"""Scores of answers about clips: pure functions of strings; a malformed answer scores zero and never raises."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.harness.seedling.scene_scores import iou, reading_score, words
from espalier.harness.seedling.scenes import BOX, COLOUR_NAMES
from espalier.harness.seedling.sprites import SHAPES
from espalier.harness.seedling.video.captions import sentence
from espalier.harness.seedling.video.clip_vocabulary import PLACES
from espalier.harness.seedling.video.events import Event
from espalier.harness.seedling.vocabulary import box_from_bins, locations

NEAR = 1
"""Tolerance of a moment, in frames."""
LEAST_IOU = 0.5

DIGITS = tuple(str(value) for value in range(10))
"""Words for digits."""

_TIME = re.compile(r"\bt(\d{1,4})\b")
_THING = rf"(?:{'|'.join(COLOUR_NAMES)}) (?:frame|{'|'.join(SHAPES)})"
_PLACE = "|".join(PLACES)
_AT = rf"the {_THING} at the (?:{_PLACE})"
_NEW = rf"a {_THING}(?: with digit \d)?"
_TOLD = re.compile(
    rf"(?:there is {_NEW} at the (?:{_PLACE})"
    rf"|{_NEW} enters at the (?:{_PLACE})"
    rf"|the {_THING} leaves from the (?:{_PLACE})"
    rf"|the {_THING} moves from the (?:{_PLACE}) to the (?:{_PLACE})"
    rf"|{_AT} turns (?:{'|'.join(COLOUR_NAMES)})"
    rf"|{_AT} is covered"
    rf"|{_AT} is seen again"
    rf"|{_AT} changes from digit \d to digit \d)"
)


def digits_score(answer: str, truth: str) -> float:
    """Return the share of digits read, in order (1-NED), without the times before them."""
    return reading_score(*(" ".join(_untimed(text)) for text in (answer, truth)))


def only_digits(answer: str) -> bool:
    """Return whether an answer consists of digits and times, with at least one digit."""
    tokens = _untimed(answer)
    return bool(tokens) and all(word in DIGITS for word in tokens)


def conclusion(family: str, answer: str) -> str:
    """Return the conclusion of an answer: the number after the objects, the order or the event after the times.

    Args:
        family: Family of the question.
        answer: Any text. The number is its last word; answers of other families are returned unchanged.
    """
    if family == "how_many":
        return " ".join(words(answer)[-1:])
    return " ".join(_untimed(answer)) if family == "order" else answer


def _untimed(answer: str) -> list[str]:
    return [word for word in words(answer) if not _TIME.fullmatch(word)]


@dataclass(frozen=True)
class CaptionSentence:
    """One sentence of a caption: its frame, and its words after the time."""

    frame: int
    words: str


def caption_sentences(answer: str) -> list[CaptionSentence]:
    """Return the sentences of a caption that describe an event."""
    sentences = []
    for part in answer.split(";"):
        words = " ".join(part.split())
        time = re.fullmatch(r"at time t(\d{1,4}) (.*)", words)
        if time and _TOLD.fullmatch(time[2]):
            sentences.append(CaptionSentence(int(time[1]), time[2]))
    return sentences


@dataclass(frozen=True)
class EventScore:
    """Scores of one caption, all in 0..1.

    Attributes:
        recall: Share of the events that are described correctly, in order.
        precision: Share of the described events that are correct.
        exact: Share of the events that are described correctly with their exact frame.
        parsed: Whether the answer describes any event.
    """

    recall: float
    precision: float
    exact: float
    parsed: bool


def caption_score(answer: str, events: Sequence[Event]) -> EventScore:
    """Return the scores of a caption, compared with the events of its clip.

    An event is correct if a sentence has its kind, object, digits and places, and a time within one
    frame. The match of sentences and events is the largest that is one to one and in order. Cost:
    sentences times events.
    """
    sentences = caption_sentences(answer)
    truth = [caption_sentences(sentence(event))[0] for event in events]
    right, total = match_count(sentences, truth, NEAR), max(len(truth), 1)
    return EventScore(
        recall=right / total,
        precision=right / max(len(sentences), 1),
        exact=match_count(sentences, truth, 0) / total,
        parsed=bool(sentences),
    )


def match_count(
    sentences: Sequence[CaptionSentence], truth: Sequence[CaptionSentence], tolerance: int
) -> int:
    """Return the length of the longest common subsequence, with times equal within `tolerance` frames."""
    best = [0] * (len(truth) + 1)
    for candidate in sentences:
        row = [0]
        for place, truth_sentence in enumerate(truth):
            equal = (
                candidate.words == truth_sentence.words
                and abs(candidate.frame - truth_sentence.frame) <= tolerance
            )
            row.append(max(row[-1], best[place + 1], best[place] + equal))
        best = row
    return best[-1]


def moment(answer: str) -> int | None:
    """Return the frame in an answer; None unless it names exactly one time."""
    times = _TIME.findall(answer)
    return int(times[0]) if len(times) == 1 else None


@dataclass(frozen=True)
class MomentScore:
    """Scores of an answer that names a moment and a box.

    Attributes:
        correct: Whether the moment is within one frame and the IoU at least 0.5.
        near: Whether the moment is within one frame.
        iou: Intersection over union of the boxes; 0 without exactly four location tokens.
        parsed: Whether the answer names one moment and one box.
    """

    correct: bool
    near: bool
    iou: float
    parsed: bool


def moment_score(answer: str, frame: int, box: BOX) -> MomentScore:
    """Return the scores of an answer to a question for the moment and box of an event."""
    frame_named, bins = moment(answer), locations(answer)
    near = frame_named is not None and abs(frame_named - frame) <= NEAR
    overlap = iou(box_from_bins(bins), box) if len(bins) == 4 else 0.0
    return MomentScore(
        correct=near and overlap >= LEAST_IOU,
        near=near,
        iou=overlap,
        parsed=frame_named is not None and len(bins) == 4,
    )
