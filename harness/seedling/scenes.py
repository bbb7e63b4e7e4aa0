"""Synthetic scenes: framed real digits and coloured shapes on a cluttered background.

A scene is a pure function of (split, seed, index). Drawing uses only integer arithmetic, so pixels
are identical on every machine and need not be stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import cast

import numpy as np
from PIL import Image

from espalier.harness.seedling.counter_random import SPLITS, DrawStream, draws, mix64, uniform

SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond")
SIZES = (16, 18, 20, 22, 24)
FRAME = 3
"""Width in pixels of a digit's frame: 2 of colour, 1 of black."""

# Training-only distortions of a digit, as (slant, stretch_x, stretch_y, shift_x, shift_y): slant and
# stretch in 1/64 of a pixel per pixel, shift in 1/64 of a source pixel. Entry 0 is the identity.
DISTORTIONS = (
    (0, 0, 0, 0, 0),
    (10, 0, 0, 0, 0),
    (-10, 0, 0, 0, 0),
    (0, 8, 0, 0, 0),
    (0, 0, 8, 0, 0),
    (6, -5, -5, 24, 0),
    (-6, -5, -5, -24, 0),
    (5, 5, -4, 0, 24),
    (-5, -4, 5, 0, -24),
)


def distort_resize(images: np.ndarray, side: int, distortion: tuple[int, ...]) -> np.ndarray:
    """Resize uint8 images ``(N, 8, 8)`` to ``(N, side, side)`` in fixed-point bilinear arithmetic.

    Args:
        images: Square uint8 images ``(N, H, H)``.
        side: Output side in pixels.
        distortion: One entry of :data:`DISTORTIONS`.

    Returns:
        int32 grey values in 0..255, ``(N, side, side)``.
    """
    height = images.shape[1]
    slant, stretch_x, stretch_y, shift_x, shift_y = distortion
    centre = (height - 1) * 128
    # Source position of every output row and column, in 8.8 fixed point.
    line = ((2 * np.arange(side) + 1) * height * 128) // side - 128
    rows = line[:, None] + ((line[:, None] - centre) * stretch_y) // 64 + shift_y * 4
    columns = line[None, :] + ((line[None, :] - centre) * stretch_x) // 64 + shift_x * 4
    columns = columns + ((line[:, None] - centre) * slant) // 64
    rows = np.clip(np.broadcast_to(rows, (side, side)), 0, (height - 1) * 256)
    columns = np.clip(np.broadcast_to(columns, (side, side)), 0, (height - 1) * 256)
    row, row_part = rows >> 8, rows & 255
    column, column_part = columns >> 8, columns & 255
    next_row = np.minimum(row + 1, height - 1)
    next_column = np.minimum(column + 1, height - 1)
    grey = images.astype(np.int64)
    left = grey[:, row, column] * (256 - row_part) + grey[:, next_row, column] * row_part
    right = grey[:, row, next_column] * (256 - row_part) + grey[:, next_row, next_column] * row_part
    resized: np.ndarray = (left * (256 - column_part) + right * column_part) >> 16
    return resized.astype(np.int32)


@cache
def shape_mask(name: str, side: int) -> np.ndarray:
    """Return the boolean mask ``(side, side)`` of a shape, from integer inequalities only; callers share it."""
    row, column = np.mgrid[0:side, 0:side]
    x, y = 2 * column + 1 - side, 2 * row + 1 - side
    masks: dict[str, np.ndarray] = {
        "circle": x * x + y * y <= side * side,
        "square": np.ones((side, side), bool),
        "triangle": 2 * np.abs(x) <= y + side,
        "cross": (np.abs(x) * 3 <= side) | (np.abs(y) * 3 <= side),
        "diamond": np.abs(x) + np.abs(y) <= side,
        # sqrt|x| + sqrt|y| <= sqrt(side), squared twice to stay in integers
        "star": 4 * np.abs(x * y) <= np.maximum(side - np.abs(x) - np.abs(y), 0) ** 2,
    }
    return masks[name]


@cache
def noise_bank() -> np.ndarray:
    """Return eight uint8 noise fields ``(8, 128, 128, 3)`` centred on 30: blocks plus white noise; shared."""
    bits = draws(7, "train", np.arange(8), 128 * 128).reshape(8, 128, 128)
    white = uniform(bits, 25).astype(np.int32) - 12
    values = uniform(mix64(bits[:, ::16, ::16]), 37).astype(np.int32) - 18
    blocks = values.repeat(16, axis=1).repeat(16, axis=2)
    return np.repeat((white + blocks + 30).astype(np.uint8)[..., None], 3, axis=-1)


class Digits:
    """Real 8x8 digits (scikit-learn's copy of the UCI set), split by the hash of their pixels.

    Splitting by content keeps exact duplicates of an image in one split.
    """

    def __init__(self) -> None:
        """Load the digits from scikit-learn's package data."""
        # Imported here: scikit-learn takes a second.
        from sklearn.datasets import load_digits

        data = load_digits()
        self.images = (data.images.astype(np.int64) * 255 // 16).astype(np.uint8)
        self.labels = data.target.astype(np.int64)
        hashes = [hashlib.sha256(image.tobytes()).hexdigest() for image in self.images]
        bucket = np.array([int(digest[:8], 16) % 100 for digest in hashes])
        self.split_codes = np.select(
            [bucket < 75, bucket < 80], [SPLITS["train"], SPLITS["val"]], SPLITS["test"]
        ).astype(np.int64)

    @cached_property
    def pools(self) -> dict[str, list[np.ndarray]]:
        """Image numbers per split and digit value."""
        return {
            split: [
                np.flatnonzero((self.split_codes == code) & (self.labels == v)) for v in range(10)
            ]
            for split, code in SPLITS.items()
        }


@cache
def digits() -> Digits:
    """Return the process's digits."""
    return Digits()


@cache
def sprites(size: int, distortion: int = 0) -> np.ndarray:
    """Return the digits ``(N, s, s)`` for an object size, under an entry of :data:`DISTORTIONS`; callers share them."""
    return distort_resize(digits().images, size - 2 * FRAME, DISTORTIONS[distortion])


def draw_clutter(image: np.ndarray, stream: DrawStream, count: int, level: int = 0) -> None:
    """Draw grey blocks of at most 6 x 6 pixels into a square ``(S, S, 3)``, darker by ``level``."""
    for _ in range(count):
        y, x = stream.below(len(image) - 6), stream.below(len(image) - 6)
        height, width = 1 + stream.below(6), 1 + stream.below(6)
        image[y : y + height, x : x + width] = 70 + stream.below(90) - level


def draw_digit(region: np.ndarray, sprite: np.ndarray, colour: np.ndarray, stroke: int) -> None:
    """Draw a framed digit into ``region`` ``(s, s, 3)`` in place."""
    border = FRAME - 1
    region[:] = colour
    region[border:-border, border:-border] = 16
    grey = 16 + sprite * (stroke - 16) // 255
    region[FRAME:-FRAME, FRAME:-FRAME] = grey[:, :, None]


WIDTH = 96
CELL = 32
PATCH = 8
"""Side of a patch of the model's tower in pixels."""
GRID = WIDTH // PATCH
MIN_OVERLAP = 12
"""Minimum pixels of an object in a patch that shows it."""
MAX_OBJECTS = 6
MAX_CLUTTER = 12
COLOURS = {
    "red": (222, 44, 40),
    "green": (36, 170, 60),
    "blue": (52, 84, 232),
    "yellow": (236, 216, 44),
    "cyan": (44, 208, 220),
    "purple": (156, 60, 204),
    "orange": (244, 140, 32),
    "white": (236, 236, 236),
}
COLOUR_NAMES = tuple(COLOURS)
RGB = np.array(list(COLOURS.values()), np.int32)
BOX = tuple[int, int, int, int]

_DRAWS = 160
_LARGEST = np.uint64(0xFFFFFFFFFFFFFFFF)
_SLOTS = np.arange(MAX_OBJECTS)


@dataclass(frozen=True)
class SceneObject:
    """One object of a scene.

    Attributes:
        kind: "digit" or "shape".
        name: The digit ("0".."9") or the shape's name.
        colour: Name of the colour of the frame (digit) or of the body (shape); unique in a scene.
        box: Pixels ``(x0, y0, x1, y1)``; x1 and y1 are exclusive.
    """

    kind: str
    name: str
    colour: str
    box: BOX


@dataclass(frozen=True)
class Scene:
    """A drawn scene: its address, pixels ``(96, 96, 3)`` uint8 and objects in reading order."""

    split: str
    seed: int
    index: int
    image: np.ndarray
    objects: tuple[SceneObject, ...]

    def to_pil(self) -> Image.Image:
        """Return the image as an RGB PIL image."""
        return Image.fromarray(self.image)


@dataclass
class SceneLayout:
    """Parameters of B scenes. Object arrays are ``(B, 6)``; only the first ``count`` slots are used."""

    split: str
    count: np.ndarray
    is_digit: np.ndarray
    colour: np.ndarray
    digit: np.ndarray
    shape: np.ndarray
    size: np.ndarray
    left: np.ndarray
    top: np.ndarray
    draws: np.ndarray

    def __len__(self) -> int:
        """Return the number of scenes."""
        return len(self.count)

    def objects(self, row: int) -> tuple[SceneObject, ...]:
        """Return the objects of one scene of the batch."""
        items = []
        for slot in range(int(self.count[row])):
            x, y, size = (int(a[row, slot]) for a in (self.left, self.top, self.size))
            kind, name = (
                ("digit", str(self.digit[row, slot]))
                if self.is_digit[row, slot]
                else ("shape", SHAPES[self.shape[row, slot]])
            )
            box = (x, y, x + size, y + size)
            items.append(SceneObject(kind, name, COLOUR_NAMES[self.colour[row, slot]], box))
        return tuple(items)


def make_layout(
    split: str,
    seed: int,
    index: np.ndarray | Sequence[int],
    min_objects: int = 3,
    max_objects: int = MAX_OBJECTS,
) -> SceneLayout:
    """Return the objects and positions of B scenes.

    Args:
        split: "train", "val" or "test".
        seed: Scene seed.
        index: Scene indices ``(B,)``.
        min_objects: Minimum number of objects; below 3 only for the training curriculum.
        max_objects: Maximum number of objects, at most 6.

    Returns:
        The layouts, one row per index.
    """
    bits = draws(seed, split, index, _DRAWS)
    count = min_objects + uniform(bits[:, 0], max_objects - min_objects + 1)
    mixed_digits = 1 + uniform(bits[:, 1], np.maximum(count - 1, 1))
    any_digits = uniform(bits[:, 1], count + 1)
    digits = np.where(count >= 3, mixed_digits, any_digits)
    real = _SLOTS[None] < count[:, None]

    # Distinct cells of a 3x3 grid, in reading order; unused slots sort to the end.
    cells = np.argsort(bits[:, 2:11], axis=1)[:, :MAX_OBJECTS]
    cells = np.sort(cells + np.where(real, 0, 100), axis=1)
    order = np.argsort(np.where(real, bits[:, 11:17], _LARGEST), axis=1, kind="stable")
    is_digit = np.zeros(real.shape, bool)
    np.put_along_axis(is_digit, order, _SLOTS[None] < digits[:, None], axis=1)
    size = np.array(SIZES)[uniform(bits[:, 37:43], len(SIZES))]
    return SceneLayout(
        split=split,
        count=count,
        is_digit=is_digit,
        colour=np.argsort(bits[:, 17:25], axis=1)[:, :MAX_OBJECTS],
        digit=uniform(bits[:, 25:31], 10),
        shape=uniform(bits[:, 31:37], len(SHAPES)),
        size=size,
        left=(cells % 3) * CELL + uniform(bits[:, 43:49], CELL - size + 1),
        top=(cells // 3) * CELL + uniform(bits[:, 49:55], CELL - size + 1),
        draws=bits,
    )


class Scenes:
    """Renderer of scenes. Cheap to build, not random."""

    def __init__(self) -> None:
        """Load the digits."""
        self.digits = digits()

    def scene(self, split: str, seed: int, index: int) -> Scene:
        """Return one scene, with pixels and objects determined by the arguments."""
        layout = make_layout(split, seed, [index])
        return Scene(split, seed, index, self.render(layout)[0], layout.objects(0))

    def batch(
        self,
        split: str,
        seed: int,
        index: np.ndarray | Sequence[int],
        min_objects: int = 3,
        max_objects: int = MAX_OBJECTS,
        distort: bool = False,
    ) -> tuple[SceneLayout, np.ndarray]:
        """Return the layouts and pixels ``(B, 96, 96, 3)`` of many scenes.

        Args:
            split: "train", "val" or "test".
            seed: Scene seed.
            index: Scene indices ``(B,)``.
            min_objects: See :func:`make_layout`.
            max_objects: See :func:`make_layout`.
            distort: Distort the digits; only for training the vision tower.

        Returns:
            The layout and uint8 pixels.
        """
        layout = make_layout(split, seed, index, min_objects, max_objects)
        return layout, self.render(layout, distort)

    def digit_image_numbers(self, layout: SceneLayout) -> np.ndarray:
        """Return the number of each slot's digit image ``(B, 6)``; valid where ``is_digit``."""
        pools = self.digits.pools[layout.split]
        sizes = np.array([len(pool) for pool in pools])
        picks = uniform(layout.draws[:, 136:142], sizes[layout.digit])
        padded = np.zeros((10, sizes.max()), np.int64)
        for value, pool in enumerate(pools):
            padded[value, : len(pool)] = pool
        return cast("np.ndarray", padded[layout.digit, picks])

    def render(self, layout: SceneLayout, distort: bool = False) -> np.ndarray:
        """Return the pixels ``(B, 96, 96, 3)`` uint8 of a layout."""
        bits = layout.draws
        images = self._backgrounds(bits)
        jitter = uniform(bits[:, 130:136], 25).astype(np.int32) - 12
        colours = np.clip(RGB[layout.colour] + jitter[:, :, None], 0, 255).astype(np.uint8)
        strokes = 190 + uniform(bits[:, 142:148], 60)
        numbers = self.digit_image_numbers(layout)
        variants = (
            uniform(bits[:, 148:154], len(DISTORTIONS)) if distort else np.zeros_like(numbers)
        )
        for row, image in enumerate(images):
            for slot in range(int(layout.count[row])):
                size, colour = int(layout.size[row, slot]), colours[row, slot]
                x, y = int(layout.left[row, slot]), int(layout.top[row, slot])
                region = image[y : y + size, x : x + size]
                if layout.is_digit[row, slot]:
                    sprite = sprites(size, int(variants[row, slot]))[numbers[row, slot]]
                    draw_digit(region, sprite, colour, int(strokes[row, slot]))
                else:
                    region[shape_mask(SHAPES[layout.shape[row, slot]], size)] = colour
        return images

    def _backgrounds(self, bits: np.ndarray) -> np.ndarray:
        """Return tinted noise with grey clutter ``(B, 96, 96, 3)`` uint8."""
        level = 40 + uniform(bits[:, 60], 50)
        field, top, left = (uniform(bits[:, 61 + i], n) for i, n in enumerate((8, 33, 33)))
        tint = uniform(bits[:, 64:67], 17).astype(np.int32) - 8
        # The noise bank has an offset of 30, so every sum stays within 2..128, without clipping.
        offset = (level[:, None] + tint - 30).astype(np.uint8)
        blocks = 4 + uniform(bits[:, 67], MAX_CLUTTER - 3)
        ys, xs = uniform(bits[:, 70:82], WIDTH - 6), uniform(bits[:, 82:94], WIDTH - 6)
        heights, widths = 1 + uniform(bits[:, 94:106], 6), 1 + uniform(bits[:, 106:118], 6)
        greys = 70 + uniform(bits[:, 118:130], 90)
        images = np.empty((len(bits), WIDTH, WIDTH, 3), np.uint8)
        for row, image in enumerate(images):
            y, x = int(top[row]), int(left[row])
            noise = noise_bank()[field[row], y : y + WIDTH, x : x + WIDTH]
            np.add(noise, offset[row], out=image)
            for k in range(int(blocks[row])):
                y, x = int(ys[row, k]), int(xs[row, k])
                image[y : y + heights[row, k], x : x + widths[row, k]] = greys[row, k]
        return images
