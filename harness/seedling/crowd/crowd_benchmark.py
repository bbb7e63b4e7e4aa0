"""The benchmark of crowded scenes: one question per scene, and the metrics of its answer."""

from __future__ import annotations

from typing import Any

from espalier.harness.seedling.crowd.crowd_questions import MAKERS, question_stream
from espalier.harness.seedling.crowd.crowd_scenes import crowd_objects, crowd_scene
from espalier.harness.seedling.scene_benchmarks import question_record
from espalier.harness.seedling.scene_scores import exact_match, is_one_of
from espalier.harness.seedling.scenes import COLOUR_NAMES, Scene, SceneObject
from espalier.harness.seedling.sprites import SHAPES

CYCLE = ("count", "relation", "attribute", "count", "relation", "count", "relation", "attribute")
"""Question families, used cyclically over the scenes.

The model learns to read numbers too, not yet well enough, and existence, which is right by chance in half of the cases.
"""

_DIGITS = tuple(str(value) for value in range(10))
_ANSWERS = {
    "count": _DIGITS,
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
    """Return the metrics of an answer of one word, also by family."""
    right = exact_match(answer, sample["answer"])
    family = sample["family"]
    return {
        "accuracy": right,
        f"accuracy_{family}": right,
        "unparsed": float(not is_one_of(answer, _ANSWERS[family])),
    }
