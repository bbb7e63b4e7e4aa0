"""Elements of scenes: digit images and their splits, shape masks and a noise bank."""

from __future__ import annotations

import hashlib
from functools import cached_property

import numpy as np

from espalier.harness.seedling.counter_random import SPLITS, draws, mix64, uniform

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


def shape_mask(name: str, side: int) -> np.ndarray:
    """Return the boolean mask ``(side, side)`` of a shape, from integer inequalities only."""
    row, column = np.mgrid[0:side, 0:side]
    x: np.ndarray = 2 * column + 1 - side
    y: np.ndarray = 2 * row + 1 - side
    mask: np.ndarray
    if name == "circle":
        mask = x * x + y * y <= side * side
    elif name == "square":
        mask = np.ones((side, side), bool)
    elif name == "triangle":
        mask = 2 * np.abs(x) <= y + side
    elif name == "cross":
        mask = (np.abs(x) * 3 <= side) | (np.abs(y) * 3 <= side)
    elif name == "diamond":
        mask = np.abs(x) + np.abs(y) <= side
    elif name == "star":  # sqrt|x| + sqrt|y| <= sqrt(side), squared twice to stay in integers
        mask = 4 * np.abs(x * y) <= np.maximum(side - np.abs(x) - np.abs(y), 0) ** 2
    else:
        raise KeyError(name)
    return mask


def noise_bank() -> np.ndarray:
    """Return eight uint8 noise fields ``(8, 128, 128, 3)`` centred on 30: blocks plus white noise."""
    bits = draws(7, "train", np.arange(8), 128 * 128).reshape(8, 128, 128)
    white = uniform(bits, 25).astype(np.int32) - 12
    blocks = uniform(mix64(bits[:, ::16, ::16]), 37).astype(np.int32) - 18
    blocks = blocks.repeat(16, axis=1).repeat(16, axis=2)
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
        bucket = np.array([self._bucket(image) for image in self.images])
        self.split_codes = np.select(
            [bucket < 75, bucket < 80], [SPLITS["train"], SPLITS["val"]], SPLITS["test"]
        ).astype(np.int64)

    @staticmethod
    def _bucket(image: np.ndarray) -> int:
        return int(hashlib.sha256(image.tobytes()).hexdigest()[:8], 16) % 100

    @cached_property
    def pools(self) -> dict[str, list[np.ndarray]]:
        """Image numbers per split and digit value."""
        return {
            split: [
                np.flatnonzero((self.split_codes == code) & (self.labels == v)) for v in range(10)
            ]
            for split, code in SPLITS.items()
        }

    @cached_property
    def sprites(self) -> dict[int, np.ndarray]:
        """Undistorted digits ``(N, s, s)`` per object size."""
        return {
            size: distort_resize(self.images, size - 2 * FRAME, DISTORTIONS[0]) for size in SIZES
        }

    @cached_property
    def distorted_sprites(self) -> dict[int, np.ndarray]:
        """Digits ``(len(DISTORTIONS), N, s, s)`` per object size, for training the vision tower."""
        return {
            size: np.stack([distort_resize(self.images, size - 2 * FRAME, d) for d in DISTORTIONS])
            for size in SIZES
        }

    def fingerprint(self) -> str:
        """Return a hash of the digits, labels and split codes."""
        parts = (self.images, self.labels, self.split_codes)
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:16]
