"""Boxes in answers: questions for them, their formats, and their scores. Pure functions.

A box is (left, top, right, bottom) in pixels of the stored picture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

Box = tuple[float, float, float, float]

_PLAIN = "Please provide the bounding box coordinate of the region this sentence describes: {}"

#: Questions by box format; the description replaces the braces.
QUESTIONS = {
    # lmms-eval's question, which explains the format to a model without one.
    "unit": (
        "Bounding box coordinates are specified in the format "
        "(top-left x, top-left y, bottom-right x, bottom-right y). "
        "All values are floating point numbers bounded between 0 and 1. " + _PLAIN
    ),
    # LLaVA-1.5's training data.
    "square": _PLAIN,
    # Qwen2.5-VL's examples.
    "pixels": "Locate {}, output its bbox coordinates using JSON format.",
    "thousand": _PLAIN,
    # InternVL's evaluation.
    "tagged": "Please provide the bounding box coordinate of the region this sentence describes: <ref>{}</ref>",
}

#: The largest coordinate of each format; for pixels it depends on the picture.
LARGEST = {"unit": 1.0, "square": 1.0, "thousand": 1000.0, "tagged": 1000.0}

# All counts are bounded, so that matching takes linear time.
_NUMBER = r"\s{0,8}(-?\d{1,6}(?:\.\d{0,12})?|-?\.\d{1,12})\s{0,8}"
_FOUR = ",".join([_NUMBER] * 4)
_TWO = f"{_NUMBER},{_NUMBER}"
#: [x1, y1, x2, y2] also inside [[...]], JSON and <box>; (x1,y1),(x2,y2) is what Qwen2-VL puts between its box tokens.
_BOX = re.compile(rf"\[{_FOUR}\]|\({_FOUR}\)|\({_TWO}\)\s{{0,8}},\s{{0,8}}\({_TWO}\)")


@dataclass(frozen=True)
class Resized:
    """Size bounds of pictures for a model that writes pixels: sides are multiples of `factor`, the area is bounded."""

    factor: int
    min_pixels: int
    max_pixels: int

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of a picture after the resizing of Qwen's processor."""
        # The import takes seconds, and only models that write pixels need it.
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        rows, columns = smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels)
        return columns, rows


def question(boxes: str, description: str) -> str:
    """Return the question for a model that writes boxes in this format."""
    return QUESTIONS[boxes].format(description)


def parse(answer: str) -> Box | None:
    """Return the first box in an answer, as written; None if there is none."""
    match = _BOX.search(answer)
    if match is None:
        return None
    x0, y0, x1, y1 = (float(number) for number in match.groups() if number is not None)
    return x0, y0, x1, y1


def to_picture(
    box: Box, boxes: str, width: int, height: int, resized: Resized | None = None
) -> Box | None:
    """Return a box as written as one in pixels of the picture; None if its numbers are not of that format.

    Corners in the wrong order and a box that reaches beyond the picture are kept: the overlap scores them. Numbers
    beyond twice the scale belong to another scale.

    Args:
        box: as written.
        boxes: the format.
        width: of the picture, in pixels.
        height: of the picture, in pixels.
        resized: size bounds of the picture, for the format `pixels`.
    """
    largest = LARGEST.get(boxes)
    if largest is not None and any(abs(coordinate) > 2 * largest for coordinate in box):
        return None
    if boxes == "square":
        side = max(width, height)
        across, down = side, side
        aside, above = (side - width) // 2, (side - height) // 2
    else:
        across, down, aside, above = width, height, 0, 0
    if boxes == "pixels":
        if resized is None:
            raise ValueError("boxes=pixels needs the size of the picture that the model saw")
        wide, high = resized.size(width, height)
    else:
        wide = high = int(LARGEST[boxes])
    x0, y0, x1, y1 = box
    return (
        x0 * across / wide - aside,
        y0 * down / high - above,
        x1 * across / wide - aside,
        y1 * down / high - above,
    )


def iou(first: Box, second: Box) -> float:
    """Return the intersection over union of two boxes; corners in the wrong order enclose nothing."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    shared = max(width, 0.0) * max(height, 0.0)
    union = _area(first) + _area(second) - shared
    return shared / union if union > 0 else 0.0


def _area(box: Box) -> float:
    return max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0)


def score(
    answer: str,
    truth: Box,
    boxes: str,
    size: tuple[int, int],
    resized: Resized | None = None,
) -> Mapping[str, float]:
    """Score an answer: a hit from an overlap of 0.5 on; an answer without a box of the format is wrong, and unparsed.

    Args:
        answer: the model's answer.
        truth: the object's box.
        boxes: the format.
        size: width and height of the picture.
        resized: size bounds of the picture, for the format `pixels`.
    """
    written = parse(answer)
    box = None if written is None else to_picture(written, boxes, *size, resized)
    overlap = 0.0 if box is None else iou(box, truth)
    return {
        "acc_at_50": float(overlap >= 0.5),
        "mean_iou": overlap,
        "unparsed": float(box is None),
    }
