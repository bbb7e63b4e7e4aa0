"""The benchmark of crowded scenes: one question per scene, and the metrics of its answer."""

from __future__ import annotations

from typing import Any

from espalier.harness.seedling.crowd.crowd_questions import MAKERS, question_stream
from espalier.harness.seedling.crowd.crowd_scenes import LONGEST_NUMBER, crowd_objects, crowd_scene
from espalier.harness.seedling.scene_benchmarks import question_record
from espalier.harness.seedling.scene_scores import exact_match, words
from espalier.harness.seedling.scenes import COLOUR_NAMES, Scene, SceneObject
from espalier.harness.seedling.sprites import SHAPES

CYCLE = ("count", "relation", "number", "attribute", "relation", "count", "number", "relation")
"""Question families, used cyclically over the scenes; existence is left out, since chance is right in half of them."""

_DIGITS = tuple(str(value) for value in range(10))
_WORDS = {
    "count": _DIGITS,
    "number": _DIGITS,
    "relation": COLOUR_NAMES,
    "attribute": (*COLOUR_NAMES, *SHAPES),
}


def samples(split: str, seed: int, first: int, count: int) -> list[dict[str, Any]]:
    """Return the samples, without images.

    Args:
        split: "val" or "test".
        seed: Scene seed.
        first: Index of the first scene.
        count: Number of samples, one scene each.

    Returns:
        Records of plain values; "box" is empty where the question has no target.
    """
    records = []
    for number, index in enumerate(range(first, first + count)):
        make = MAKERS[CYCLE[number % len(CYCLE)]]
        question = make(crowd_objects(split, seed, index), question_stream(split, seed, index))
        records.append(question_record(question, split, seed, index))
    return records


def sample_scene(sample: dict[str, Any]) -> Scene:
    """Return the drawn scene of a sample."""
    return crowd_scene(sample["split"], sample["seed"], sample["index"])


def sample_objects(sample: dict[str, Any]) -> tuple[SceneObject, ...]:
    """Return the objects of a sample's scene without drawing it."""
    return crowd_objects(sample["split"], sample["seed"], sample["index"])


def crowd_metrics(sample: dict[str, Any], answer: str) -> dict[str, float]:
    """Return the metrics of an answer, also by family; all digits of a number count as one."""
    right, family = exact_match(answer, sample["answer"]), sample["family"]
    answer_words, longest = words(answer), LONGEST_NUMBER if family == "number" else 1
    parsed = 0 < len(answer_words) <= longest and all(
        word in _WORDS[family] for word in answer_words
    )
    return {
        "accuracy": right,
        f"accuracy_{family}": right,
        "unparsed": float(not parsed),
    }
