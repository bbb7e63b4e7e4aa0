"""Labels of patches and scenes, for training the vision tower and the projector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from espalier.harness.seedling.crowd import GRID as CROWD_GRID
from espalier.harness.seedling.scenes import (
    COLOUR_NAMES,
    GRID,
    MAX_OBJECTS,
    MIN_OVERLAP,
    PATCH,
    SHAPES,
    SceneLayout,
    SceneObject,
)
from espalier.harness.seedling.vocabulary import BIN

CLASSES = 1 + 10 + len(SHAPES)
"""Background, ten digits, six shapes."""

GLOBAL_LABELS = 10 + len(COLOUR_NAMES) + len(SHAPES)


@dataclass
class PatchTargets:
    """Labels of the ``N = 144`` patches of B scenes.

    Attributes:
        label: 0 background, 1..10 digit, 11..16 shape ``(B, N)``.
        colour: Colour number, -1 on background ``(B, N)``.
        box: Location bins of the object's box ``(B, N, 4)``, -1 on background.
        owner: Object slot, -1 on background ``(B, N)``.
        overlap: Pixels of the owner inside the patch ``(B, N)``.
    """

    label: np.ndarray
    colour: np.ndarray
    box: np.ndarray
    owner: np.ndarray
    overlap: np.ndarray


def _overlap(start: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return the pixels of ``[start, start + size)`` in each grid line ``(B, 12)``."""
    edge = np.arange(GRID) * PATCH
    low = np.maximum(edge[None], start[:, None])
    high = np.minimum(edge[None] + PATCH, (start + size)[:, None])
    overlap: np.ndarray = np.clip(high - low, 0, PATCH)
    return overlap


def patch_targets(layout: SceneLayout) -> PatchTargets:
    """Return the labels of each patch, those of the object that covers most of it."""
    shape = (len(layout), GRID, GRID)
    label, overlap = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    colour, owner = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
    box = np.full((*shape, 4), -1, np.int64)
    for slot in range(MAX_OBJECTS):
        left, top, size = layout.left[:, slot], layout.top[:, slot], layout.size[:, slot]
        area = _overlap(top, size)[:, :, None] * _overlap(left, size)[:, None, :]
        area = area * (slot < layout.count)[:, None, None]
        wins = (area > overlap) & (area >= MIN_OVERLAP)
        class_number = np.where(
            layout.is_digit[:, slot], 1 + layout.digit[:, slot], 11 + layout.shape[:, slot]
        )
        bins = np.stack([left, top, left + size - 1, top + size - 1], axis=-1) // BIN
        overlap = np.where(wins, area, overlap)
        label = np.where(wins, class_number[:, None, None], label)
        colour = np.where(wins, layout.colour[:, slot][:, None, None], colour)
        owner = np.where(wins, slot, owner)
        box = np.where(wins[..., None], bins[:, None, None, :], box)
    flat = (len(layout), GRID * GRID)
    return PatchTargets(
        label.reshape(flat),
        colour.reshape(flat),
        box.reshape(*flat, 4),
        owner.reshape(flat),
        overlap.reshape(flat),
    )


def global_targets(layout: SceneLayout) -> np.ndarray:
    """Return a float32 indicator ``(B, 24)`` of the digits, colours and shapes present."""
    present = np.zeros((len(layout), GLOBAL_LABELS), np.float32)
    for slot in range(MAX_OBJECTS):
        rows = np.flatnonzero(slot < layout.count)
        first_shape = 10 + len(COLOUR_NAMES)
        label_number = np.where(
            layout.is_digit[:, slot], layout.digit[:, slot], first_shape + layout.shape[:, slot]
        )
        present[rows, label_number[rows]] = 1
        present[rows, 10 + layout.colour[rows, slot]] = 1
    return present


def crowd_targets(scenes: Sequence[Sequence[SceneObject]]) -> PatchTargets:
    """Return the labels of the ``N = 576`` patches of B scenes, those of the object that covers most of each."""
    shape = (len(scenes), CROWD_GRID, CROWD_GRID)
    label, overlap = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    colour, owner = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
    box = np.full((*shape, 4), -1, np.int64)
    edge = np.arange(CROWD_GRID) * PATCH
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
    flat = (len(scenes), CROWD_GRID * CROWD_GRID)
    return PatchTargets(
        label.reshape(flat),
        colour.reshape(flat),
        box.reshape(*flat, 4),
        owner.reshape(flat),
        overlap.reshape(flat),
    )
