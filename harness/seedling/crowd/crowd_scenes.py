"""Crowded scenes of 192 x 192 pixels: rows of framed digits among shapes that share colours and names.

A scene is a pure function of (split, seed, index) in integer arithmetic. Objects have the pixel size of seedling's
scenes, and none crosses the middle lines, so each quarter of the picture looks like one of those scenes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np

from espalier.harness.seedling.counter_random import DrawStream, draws
from espalier.harness.seedling.patch_targets import MIN_OVERLAP, PATCH, PatchTargets
from espalier.harness.seedling.scenes import CELL, COLOUR_NAMES, COLOURS, WIDTH, Scene, SceneObject
from espalier.harness.seedling.sprites import (
    DISTORTIONS,
    FRAME,
    SHAPES,
    Digits,
    noise_bank,
    shape_mask,
)

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
_DRAWS = 512
_RGB = np.array(list(COLOURS.values()), np.int32)

Item = TypeVar("Item")


def shuffled(items: Sequence[Item], stream: DrawStream) -> list[Item]:
    """Return the items in a random order."""
    pool = list(items)
    return [pool.pop(stream.below(len(pool))) for _ in range(len(pool))]


def crowd_stream(kind: str, split: str, seed: int, index: int) -> DrawStream:
    """Return the draws of one scene for its "objects" or its "pixels"."""
    return DrawStream(draws(seed + _OFFSETS[kind], split, [index], _DRAWS)[0])


def crowd_objects(split: str, seed: int, index: int) -> tuple[SceneObject, ...]:
    """Return the objects of a scene in reading order, by rows of 32 pixels.

    Of four kinds of shape there are one to nine, two to four in different colours, one, and none to two.
    """
    stream = crowd_stream("objects", split, seed, index)
    rows = shuffled([(row, half) for row in range(_CELLS) for half in range(2)], stream)
    colours = shuffled(COLOUR_NAMES, stream)
    objects: list[SceneObject] = []
    for (row, half), colour in zip(rows[:NUMBERS], colours, strict=False):
        objects += _number(row, half, colour, stream)
    cells = [
        (row, half * _THIRD + column) for row, half in rows[NUMBERS:] for column in range(_THIRD)
    ]
    cells = shuffled(cells, stream)
    names = shuffled(SHAPES, stream)
    counts = (1 + stream.below(MOST_ALIKE), 2 + stream.below(3), 1, stream.below(3))
    for kind, (name, count) in enumerate(zip(names, counts, strict=False)):
        different = shuffled(COLOUR_NAMES, stream)
        for number in range(count):
            colour = different[number] if kind == 1 else stream.pick(COLOUR_NAMES)
            objects.append(_shape(name, colour, cells.pop(), stream))
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


def _shape(name: str, colour: str, cell: tuple[int, int], stream: DrawStream) -> SceneObject:
    row, column = cell
    size = stream.pick(SIZES)
    x = column * CELL + stream.below(CELL - size + 1)
    y = row * CELL + stream.below(CELL - size + 1)
    return SceneObject("shape", name, colour, (x, y, x + size, y + size))


@lru_cache(maxsize=1)
def _digits() -> Digits:
    return Digits()


@lru_cache(maxsize=1)
def _noise() -> np.ndarray:
    return noise_bank()


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
    digits = _digits()
    for item in objects:
        x0, y0, x1, y1 = item.box
        jitter, stroke = stream.below(25) - 12, 190 + stream.below(60)
        colour = np.clip(_RGB[COLOUR_NAMES.index(item.colour)] + jitter, 0, 255).astype(np.uint8)
        region = image[y0:y1, x0:x1]
        if item.kind == "shape":
            region[shape_mask(item.name, x1 - x0)] = colour
            continue
        pool = digits.pools[split][int(item.name)]
        number = pool[stream.below(len(pool))]
        variant = stream.below(len(DISTORTIONS))
        sprites = digits.distorted_sprites[x1 - x0][variant if distort else 0]
        region[:] = colour
        region[FRAME - 1 : 1 - FRAME, FRAME - 1 : 1 - FRAME] = 16
        grey = 16 + sprites[number] * (stroke - 16) // 255
        region[FRAME:-FRAME, FRAME:-FRAME] = grey[:, :, None]
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
            window = _noise()[field, y : y + WIDTH, x : x + WIDTH]
            image[row : row + WIDTH, column : column + WIDTH] = window + offset
    for _ in range(16 + stream.below(24)):
        y, x = stream.below(SIDE - 6), stream.below(SIDE - 6)
        height, width = 1 + stream.below(6), 1 + stream.below(6)
        image[y : y + height, x : x + width] = 70 + stream.below(90)
    return image


def crowd_targets(scenes: Sequence[Sequence[SceneObject]]) -> PatchTargets:
    """Return the labels of the ``N = 576`` patches of B scenes, those of the object that covers most of each."""
    shape = (len(scenes), GRID, GRID)
    label, overlap = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    colour, owner = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
    box = np.full((*shape, 4), -1, np.int64)
    edge = np.arange(GRID) * PATCH
    kinds = (*(str(digit) for digit in range(10)), *SHAPES)
    for row, objects in enumerate(scenes):
        for slot, item in enumerate(objects):
            x0, y0, x1, y1 = item.box
            height, width = (
                np.clip(np.minimum(edge + PATCH, high) - np.maximum(edge, low), 0, PATCH)
                for low, high in ((y0, y1), (x0, x1))
            )
            area = height[:, None] * width[None]
            wins = (area > overlap[row]) & (area >= MIN_OVERLAP)
            overlap[row][wins], owner[row][wins] = area[wins], slot
            label[row][wins] = 1 + kinds.index(item.name)
            colour[row][wins] = COLOUR_NAMES.index(item.colour)
            box[row][wins] = item.box
    flat = (len(scenes), GRID * GRID)
    return PatchTargets(
        label.reshape(flat),
        colour.reshape(flat),
        box.reshape(*flat, 4),
        owner.reshape(flat),
        overlap.reshape(flat),
    )
