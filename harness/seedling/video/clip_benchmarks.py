"""The three clip benchmarks: their questions, and the metrics of each answer.

Each benchmark has one question per clip, and no two benchmarks share clips.
"""

from __future__ import annotations

from typing import Any

from espalier.harness.seedling.scene_scores import exact_match, is_one_of, words
from espalier.harness.seedling.video.clip_scores import (
    DIGITS,
    NEAR,
    caption_score,
    conclusion,
    digits_score,
    moment,
    moment_score,
    only_digits,
)
from espalier.harness.seedling.video.clips import DrawnClip, clip
from espalier.harness.seedling.video.dialogues import MAKERS, dialogue_stream
from espalier.harness.seedling.video.story import tell

FAMILY_CYCLES: dict[str, tuple[str, ...]] = {
    "seedling_video_caption": ("caption",),
    "seedling_video_qa": ("what", "where", "how_many", "order", "when", "digits"),
    "seedling_video_find": ("find",),
}
"""Question families of a benchmark, used cyclically over its clips."""


def samples(
    name: str, split: str, seed: int, first: int, count: int, frames: int
) -> list[dict[str, Any]]:
    """Return the samples of a benchmark, without pixels.

    Args:
        name: A key of :data:`FAMILY_CYCLES`.
        split: "val" or "test".
        seed: Seed of the clips.
        first: Index of the first clip.
        count: Number of samples, one clip each.
        frames: Frames of each clip.
    """
    cycle = FAMILY_CYCLES[name]
    records = []
    for number in range(count):
        address = {"split": split, "seed": seed, "index": first + number, "frames": frames}
        story = tell(split, seed, first + number, frames)
        dialogue = MAKERS[cycle[number % len(cycle)]](story, dialogue_stream(story))
        records.append(
            address
            | {
                "family": dialogue.family,
                "template": dialogue.template,
                "question": dialogue.question,
                "answer": dialogue.answer,
                "moment": dialogue.target.frame if dialogue.target else -1,
                "box": list(dialogue.target.box) if dialogue.target else [],
            }
        )
    return records


def sample_clip(sample: dict[str, Any]) -> DrawnClip:
    """Return the drawn clip of a sample."""
    return clip(sample["split"], sample["seed"], sample["index"], sample["frames"])


def caption_metrics(sample: dict[str, Any], answer: str) -> dict[str, float]:
    """Return the metrics of a caption, compared with the events of its clip; "words" is its length."""
    story = tell(sample["split"], sample["seed"], sample["index"], sample["frames"])
    score = caption_score(answer, story.events)
    return {
        "events_right": score.recall,
        "events_precision": score.precision,
        "events_exact": score.exact,
        "words": float(len(answer.split())),
        "unparsed": float(not score.parsed),
    }


def qa_metrics(sample: dict[str, Any], answer: str) -> dict[str, float]:
    """Return the metrics of a short answer, by family, and except for reading also over all families.

    Counts and orders are scored by their conclusion, without the objects and times named before it.
    """
    family, truth = sample["family"], sample["answer"]
    if family == "digits":
        return {
            "one_minus_ned": digits_score(answer, truth),
            "unparsed": float(not only_digits(answer)),
        }
    answer, truth = conclusion(family, answer), conclusion(family, truth)
    right = exact_match(answer, truth)
    scores = {"accuracy": right, f"accuracy_{family}": right, "unparsed": float(not words(answer))}
    if family == "when":
        answered, expected = moment(answer), moment(truth)
        near = answered is not None and expected is not None and abs(answered - expected) <= NEAR
        scores |= {"near_when": float(near), "unparsed": float(answered is None)}
    elif family == "how_many":
        scores["unparsed"] = float(not is_one_of(answer, DIGITS))
    return scores


def find_metrics(sample: dict[str, Any], answer: str) -> dict[str, float]:
    """Return the metrics of a moment and a box; "found" requires both: within a frame, and an IoU >= 0.5."""
    score = moment_score(answer, sample["moment"], tuple(sample["box"]))
    return {
        "found": float(score.correct),
        "moment_near": float(score.near),
        "mean_iou": score.iou,
        "unparsed": float(not score.parsed),
    }
