"""The benchmark of crowded scenes: one question per scene, and the metrics of its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from espalier.harness.seedling import vocabulary
from espalier.harness.seedling.counter_random import DrawStream, Item, draws
from espalier.harness.seedling.scene_benchmarks import DIGITS, exact_match, question_record, words
from espalier.harness.seedling.scene_questions import SceneQuestion, shapes_of
from espalier.harness.seedling.scenes import (
    CELL,
    COLOUR_NAMES,
    DISTORTIONS,
    PATCH,
    RGB,
    SHAPES,
    WIDTH,
    Scene,
    SceneObject,
    digits,
    draw_clutter,
    draw_digit,
    noise_bank,
    shape_mask,
    sprites,
)
from espalier.harness.seedling.vocabulary import VOCABULARY

SIDE = 2 * WIDTH
GRID = SIDE // PATCH
SIZES = (16, 18, 20)
"""Sides of the shapes in pixels."""
DIGIT_SIZES = (22, 24)
"""Sides of the digits in pixels: seedling's tower tells smaller ones apart less often (docs/log/training.md)."""
NUMBERS = 2
"""Numbers of a scene: rows of two or more digits in frames of one colour, another for each number."""
LONGEST_NUMBER = 3
MOST_ALIKE = 9

_GAP = PATCH
"""Pixels between the digits of a number: no patch shows two digits."""
_CELLS = SIDE // CELL
_THIRD = WIDTH // CELL
_OFFSETS = {"objects": 5_000_011, "pixels": 5_000_077}
"""Separate the draws of objects and of pixels from all others with the same seed."""
_SCENE_DRAWS = 512


def shuffled(items: Sequence[Item], stream: DrawStream) -> list[Item]:
    """Return the items in a random order."""
    pool = list(items)
    return [pool.pop(stream.below(len(pool))) for _ in range(len(pool))]


def crowd_stream(kind: str, split: str, seed: int, index: int) -> DrawStream:
    """Return the draws of one scene for its "objects" or its "pixels"."""
    return DrawStream(draws(seed + _OFFSETS[kind], split, [index], _SCENE_DRAWS)[0])


def crowd_objects(split: str, seed: int, index: int) -> tuple[SceneObject, ...]:
    """Return the objects of a scene in reading order, by rows of 32 pixels.

    Of four kinds of shape there are one to nine, two to four in different colours, one, and none to two.
    """
    stream = crowd_stream("objects", split, seed, index)
    rows = shuffled([(row, half) for row in range(_CELLS) for half in range(2)], stream)
    colours = shuffled(COLOUR_NAMES, stream)
    objects = [
        item
        for (row, half), colour in zip(rows[:NUMBERS], colours, strict=False)
        for item in _number(row, half, colour, stream)
    ]
    cells = shuffled(
        [(row, half * _THIRD + column) for row, half in rows[NUMBERS:] for column in range(_THIRD)],
        stream,
    )
    names = shuffled(SHAPES, stream)
    counts = (1 + stream.below(MOST_ALIKE), 2 + stream.below(3), 1, stream.below(3))
    for kind, (name, count) in enumerate(zip(names, counts, strict=False)):
        different = shuffled(COLOUR_NAMES, stream)
        for number in range(count):
            colour = different[number] if kind == 1 else stream.pick(COLOUR_NAMES)
            row, column = cells.pop()
            size = stream.pick(SIZES)
            x = column * CELL + stream.below(CELL - size + 1)
            y = row * CELL + stream.below(CELL - size + 1)
            objects.append(SceneObject("shape", name, colour, (x, y, x + size, y + size)))
    return tuple(sorted(objects, key=lambda item: (item.box[1] // CELL, item.box[0])))


def _number(row: int, half: int, colour: str, stream: DrawStream) -> list[SceneObject]:
    count, size = 2 + stream.below(LONGEST_NUMBER - 1), stream.pick(DIGIT_SIZES)
    span = count * size + (count - 1) * _GAP
    start = half * WIDTH + stream.below(WIDTH - span + 1)
    top = row * CELL + stream.below(CELL - size + 1)
    digits = []
    for place in range(count):
        x = start + place * (size + _GAP)
        box = (x, top, x + size, top + size)
        digits.append(SceneObject("digit", str(stream.below(10)), colour, box))
    return digits


def crowd_scene(split: str, seed: int, index: int) -> Scene:
    """Return one scene with pixels ``(192, 192, 3)``."""
    objects = crowd_objects(split, seed, index)
    return Scene(split, seed, index, draw_crowd(split, seed, index, objects), objects)


def draw_crowd(
    split: str, seed: int, index: int, objects: Sequence[SceneObject], distort: bool = False
) -> np.ndarray:
    """Return the pixels ``(192, 192, 3)`` uint8 of a scene's objects.

    Args:
        split: "train", "val" or "test"; selects the digit images too.
        seed: Scene seed.
        index: Scene index.
        objects: The scene's objects.
        distort: Distort the digits; only for training.
    """
    stream = crowd_stream("pixels", split, seed, index)
    image = _background(stream)
    pools = digits().pools[split]
    for item in objects:
        x0, y0, x1, y1 = item.box
        jitter, stroke = stream.below(25) - 12, 190 + stream.below(60)
        colour = np.clip(RGB[COLOUR_NAMES.index(item.colour)] + jitter, 0, 255).astype(np.uint8)
        region = image[y0:y1, x0:x1]
        if item.kind == "shape":
            region[shape_mask(item.name, x1 - x0)] = colour
            continue
        number = stream.pick(pools[int(item.name)].tolist())
        variant = stream.below(len(DISTORTIONS))
        draw_digit(region, sprites(x1 - x0, variant * distort)[number], colour, stroke)
    return image


def _background(stream: DrawStream) -> np.ndarray:
    """Return tinted noise with grey clutter; each quarter is a window of a noise field."""
    level = 40 + stream.below(50)
    # The noise has an offset of 30, so every sum stays within 2..128.
    offset = np.array([level + stream.below(17) - 38 for _ in range(3)], np.uint8)
    image = np.empty((SIDE, SIDE, 3), np.uint8)
    for row in range(0, SIDE, WIDTH):
        for column in range(0, SIDE, WIDTH):
            field, y, x = (stream.below(bound) for bound in (8, 33, 33))
            window = noise_bank()[field, y : y + WIDTH, x : x + WIDTH]
            image[row : row + WIDTH, column : column + WIDTH] = window + offset
    draw_clutter(image, stream, 16 + stream.below(24))
    return image


SIDES = ("leftmost", "rightmost", "highest", "lowest")
TEMPLATES: dict[str, tuple[str, ...]] = {
    "attribute": ("colour_of_shape", "shape_of_colour"),
    "count": ("shape", "colour"),
    "number": ("read",),
    "relation": SIDES,
    "exist": ("coloured_shape",),
}
FAMILIES = tuple(TEMPLATES)
CLEAR = 8
"""Least distance in pixels between the centres of the outermost object and of the next."""

_STREAM_OFFSET = 5_000_111
_QUESTION_DRAWS = 256
_EXTRA = VOCABULARY.index("<extra_1>")

WORDS: tuple[str, ...] = (*VOCABULARY[:_EXTRA], *SIDES, *VOCABULARY[_EXTRA + len(SIDES) :])
"""Seedling's words, with the sides in place of spare ones."""
TOKEN_ID: dict[str, int] = {word: number for number, word in enumerate(WORDS)}


#: Returns the token ids of space-separated words; unknown words become ``<unk>``.
encode = partial(vocabulary.encode, token_ids=TOKEN_ID)


def _single(values: Sequence[str]) -> list[str]:
    return [value for value in dict.fromkeys(values) if values.count(value) == 1]


def attribute_question(objects: Sequence[SceneObject], stream: DrawStream) -> SceneQuestion:
    """Return a question for the colour of the only shape of a name, or the name of the only one of a colour."""
    shapes = shapes_of(objects)
    names = _single([item.name for item in shapes])
    colours = _single([item.colour for item in shapes])
    if stream.below(2) and colours:
        colour = stream.pick(colours)
        item = next(item for item in shapes if item.colour == colour)
        return SceneQuestion(
            "attribute", "shape_of_colour", f"what shape is {colour} ?", item.name, item
        )
    name = stream.pick(names)
    item = next(item for item in shapes if item.name == name)
    return SceneQuestion(
        "attribute", "colour_of_shape", f"what colour is the {name} ?", item.colour, item
    )


def counting_question(objects: Sequence[SceneObject], stream: DrawStream) -> SceneQuestion:
    """Return a question for the number of shapes of a name or a colour, in half of the cases the most frequent name."""
    shapes = shapes_of(objects)
    names = [item.name for item in shapes]
    choice = stream.below(4)
    if choice == 3:
        colour = stream.pick([item.colour for item in shapes])
        count = sum(item.colour == colour for item in shapes)
        return SceneQuestion("count", "colour", f"how many {colour} shapes are there ?", str(count))
    kinds = sorted(dict.fromkeys(names), key=names.count)
    name = stream.pick(kinds) if choice == 2 else kinds[-1]
    return SceneQuestion(
        "count", "shape", f"how many {name} shapes are there ?", str(names.count(name))
    )


def number_question(objects: Sequence[SceneObject], stream: DrawStream) -> SceneQuestion:
    """Return the question for the digits in frames of one colour, from left to right."""
    digits = [item for item in objects if item.kind == "digit"]
    colour = stream.pick(list(dict.fromkeys(item.colour for item in digits)))
    return SceneQuestion(
        "number",
        "read",
        f"read the {colour} digits .",
        " ".join(item.name for item in digits if item.colour == colour),
    )


def relation_question(objects: Sequence[SceneObject], stream: DrawStream) -> SceneQuestion:
    """Return a question for the colour of the outermost of several shapes of a name, if one is clearly outermost."""
    candidates = []
    for name in dict.fromkeys(item.name for item in shapes_of(objects)):
        for side in SIDES:
            axis = 0 if side in ("leftmost", "rightmost") else 1
            alike = [item for item in objects if item.name == name]
            alike.sort(key=lambda item: item.box[axis] + item.box[axis + 2])
            if side in ("rightmost", "lowest"):
                alike.reverse()
            if len(alike) < 2 or len({item.colour for item in alike}) < 2:
                continue
            first, second = (item.box[axis] + item.box[axis + 2] for item in alike[:2])
            if abs(first - second) >= 2 * CLEAR:
                candidates.append((side, alike[0]))
    if not candidates:
        return attribute_question(objects, stream)
    side, item = stream.pick(candidates)
    return SceneQuestion(
        "relation", side, f"what colour is the {side} {item.name} ?", item.colour, item
    )


def existence_question(objects: Sequence[SceneObject], stream: DrawStream) -> SceneQuestion:
    """Return a question for a shape in a colour; half of the answers are "yes".

    Where the answer is "no", the scene has the shape in other colours, and another shape in this colour if possible.
    """
    shapes = shapes_of(objects)
    present = {(item.colour, item.name) for item in shapes}
    if stream.below(2):
        item = stream.pick(shapes)
        return SceneQuestion(
            "exist", "coloured_shape", f"is there a {item.colour} {item.name} ?", "yes", item
        )
    incomplete = {
        name
        for _, name in present
        if sum(label == name for _, label in present) < len(COLOUR_NAMES)
    }
    name = stream.pick([item.name for item in shapes if item.name in incomplete])
    used = [item.colour for item in shapes if (item.colour, name) not in present]
    absent = [colour for colour in COLOUR_NAMES if (colour, name) not in present]
    return SceneQuestion(
        "exist", "coloured_shape", f"is there a {stream.pick(used or absent)} {name} ?", "no"
    )


MAKERS: dict[str, Callable[[Sequence[SceneObject], DrawStream], SceneQuestion]] = {
    "attribute": attribute_question,
    "count": counting_question,
    "number": number_question,
    "relation": relation_question,
    "exist": existence_question,
}


def question_stream(split: str, seed: int, index: int) -> DrawStream:
    """Return the question draws of one scene."""
    return DrawStream(draws(seed + _STREAM_OFFSET, split, [index], _QUESTION_DRAWS)[0])


def ask(
    objects: Sequence[SceneObject], stream: DrawStream, counts: dict[str, int]
) -> list[SceneQuestion]:
    """Return several questions about one scene, in the order of :data:`FAMILIES`."""
    return [
        MAKERS[family](objects, stream) for family in FAMILIES for _ in range(counts.get(family, 0))
    ]


CYCLE = ("count", "relation", "number", "attribute", "relation", "count", "number", "relation")
"""Question families, used cyclically over the scenes; existence is left out, since chance is right in half of them."""

_WORDS = {
    "count": DIGITS,
    "number": DIGITS,
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
