"""The five scene benchmarks: their questions, and the metrics of each answer.

Each benchmark has one question per scene, and no two benchmarks share scenes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from rapidfuzz.distance import Levenshtein

from espalier.harness.seedling.scene_questions import MAKERS, SceneQuestion, question_streams
from espalier.harness.seedling.scenes import (
    BOX,
    COLOUR_NAMES,
    SHAPES,
    Scene,
    SceneObject,
    Scenes,
    make_layout,
)
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


def caption_score(answer: str, objects: Sequence[SceneObject]) -> dict[str, float]:
    """Return the scores of a caption, compared with the objects of its scene, all in 0..1.

    Recall: share of the objects named with correct colour and kind or digit. Precision: share of the named objects that
    are correct; repeats are wrong. Close: share of all objects that are named correctly and placed near their centre.
    """
    missing = {(item.colour, item.name): item for item in objects}
    mentions = _PART.findall(str(answer).lower())
    right = close = 0
    for colour, digit, shape, tail in mentions:
        item = missing.pop((colour, digit or shape), None)
        if item is not None:
            right += 1
            close += _is_close(tail, item.box)
    total = max(len(objects), 1)
    return {
        "object_recall": right / total,
        "object_precision": right / max(len(mentions), 1),
        "object_close": close / total,
        "unparsed": float(not mentions),
    }


def _is_close(text: str, box: BOX) -> bool:
    place = locations(text)
    if len(place) != 2:
        return False
    centre = ((box[0] + box[2]) // 2, (box[1] + box[3]) // 2)
    return all(abs(p * BIN + 1 - c) <= CLOSE for p, c in zip(place, centre, strict=True))


FAMILY_CYCLES: dict[str, tuple[str, ...]] = {
    "seedling_vqa": ("attr", "exist", "attr", "count"),
    "seedling_exist": ("exist",),
    "seedling_rec": ("rec",),
    "seedling_ocr": ("ocr",),
    "seedling_caption": ("caption",),
}
"""Question families of a benchmark, used cyclically over its scenes."""

DIGITS = tuple(str(value) for value in range(10))
_ONE_WORD = {
    "digit_of_frame": DIGITS,
    "colour_of_shape": COLOUR_NAMES,
    "colour_of_digit": COLOUR_NAMES,
    "shape_of_colour": SHAPES,
}
_MOST_TRIES = 16


@lru_cache(maxsize=1)
def shared_scenes() -> Scenes:
    """Return the process's scene source; building it loads the digit images."""
    return Scenes()


def _question(
    name: str, number: int, objects: Sequence[SceneObject], split: str, seed: int, index: int
) -> SceneQuestion:
    """Return the question of the sample with this number in its benchmark."""
    cycle = FAMILY_CYCLES[name]
    make = MAKERS[cycle[number % len(cycle)]]
    stream = question_streams(split, seed, [index])[0]
    question = make(objects, stream)
    if name == "seedling_exist":  # exactly as many "yes" as "no"
        target_answer = ("yes", "no")[number % 2]
        for _ in range(_MOST_TRIES):
            if question.answer == target_answer:
                break
            question = make(objects, stream)
    return question


def samples(name: str, split: str, seed: int, first: int, count: int) -> list[dict[str, Any]]:
    """Return the samples of a benchmark, without images.

    Args:
        name: A key of :data:`FAMILY_CYCLES`.
        split: "val" or "test".
        seed: Scene seed.
        first: Index of the first scene.
        count: Number of samples, one scene each.

    Returns:
        Records of plain values; "box" is empty where the question has no target.
    """
    index = range(first, first + count)
    layout = make_layout(split, seed, index)
    records = []
    for number, scene_index in enumerate(index):
        question = _question(name, number, layout.objects(number), split, seed, scene_index)
        records.append(question_record(question, split, seed, scene_index))
    return records


def question_record(question: SceneQuestion, split: str, seed: int, index: int) -> dict[str, Any]:
    """Return the sample of a question about a scene; "box" is empty where it has no target."""
    return {
        "split": split,
        "seed": seed,
        "index": index,
        "family": question.family,
        "template": question.template,
        "question": question.text,
        "answer": question.answer,
        "box": list(question.target.box) if question.target else [],
    }


def sample_scene(sample: dict[str, Any]) -> Scene:
    """Return the drawn scene of a sample."""
    return shared_scenes().scene(sample["split"], sample["seed"], sample["index"])


def sample_objects(sample: dict[str, Any]) -> tuple[SceneObject, ...]:
    """Return the objects of a sample's scene without drawing it."""
    return make_layout(sample["split"], sample["seed"], [sample["index"]]).objects(0)


def vqa_metrics(sample: dict[str, Any], answer: str) -> dict[str, float]:
    """Return the metrics of a short answer, also by family and template."""
    right = exact_match(answer, sample["answer"])
    family, template = sample["family"], sample["template"]
    valid = ("yes", "no") if family == "exist" else _ONE_WORD.get(template, DIGITS)
    parsed = is_one_of(answer, valid)
    return {
        "accuracy": right,
        f"accuracy_{family}": right,
        f"accuracy_{family}_{template}": right,
        "unparsed": float(not parsed),
    }


def exist_metrics(sample: dict[str, Any], answer: str) -> dict[str, Any]:
    """Return the metrics of a yes/no answer; "f1" holds (truth, answer) for its aggregation."""
    reply = yes_or_no(answer)
    right = float(reply == sample["answer"])
    return {
        "accuracy": right,
        f"accuracy_{sample['template']}": right,
        "f1": [sample["answer"], reply],
        "yes_ratio": float(reply == "yes"),
        "unparsed": float(not reply),
    }


def rec_metrics(sample: dict[str, Any], answer: str) -> dict[str, float]:
    """Return the metrics of a box; "acc_at_50" is 1 for an IoU of at least 0.5."""
    overlap, parsed = box_score(answer, tuple(sample["box"]))
    right = float(overlap >= 0.5)
    return {
        "acc_at_50": right,
        f"acc_at_50_{sample['template']}": right,
        "mean_iou": overlap,
        "unparsed": float(not parsed),
    }


def ocr_metrics(sample: dict[str, Any], answer: str) -> dict[str, float]:
    """Return the metrics of digits read in order."""
    tokens = words(answer)
    parsed = bool(tokens) and all(word in DIGITS for word in tokens)
    return {
        "one_minus_ned": reading_score(answer, sample["answer"]),
        "all_read": exact_match(answer, sample["answer"]),
        "unparsed": float(not parsed),
    }


def caption_metrics(sample: dict[str, Any], answer: str) -> dict[str, float]:
    """Return the metrics of a caption, compared with the scene's objects."""
    return caption_score(answer, sample_objects(sample))


def f1_of_yes(pairs: Sequence[Sequence[str]]) -> float:
    """Return the F1 of "yes" over (truth, answer) pairs; unparsed answers count as not "yes"."""
    hits = sum(truth == reply == "yes" for truth, reply in pairs)
    claimed = sum(reply == "yes" for _, reply in pairs)
    positives = sum(truth == "yes" for truth, _ in pairs)
    return 2 * hits / (claimed + positives) if claimed + positives else 0.0
