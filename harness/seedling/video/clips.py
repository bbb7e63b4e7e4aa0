"""Generated clips: the objects of seedling's scenes, moving over a slowly changing background.

A clip is a pure function of (split, seed, index, frames) in integer arithmetic, so pixels are the same
on every machine and need not be stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from espalier.harness.seedling.counter_random import DrawStream, draws
from espalier.harness.seedling.patch_targets import GRID, MIN_OVERLAP, PATCH
from espalier.harness.seedling.scenes import COLOURS, MAX_CLUTTER, WIDTH
from espalier.harness.seedling.sprites import FRAME, Digits, noise_bank, shape_mask
from espalier.harness.seedling.video.events import Story, Track
from espalier.harness.seedling.video.story import LARGEST_JITTER, tell

WORLD = 128
"""Side of the background; a frame shows a sliding window of it."""
PANEL = (112, 72)
"""Greys of the panel over a covered object: diagonal stripes of 4 pixels, from upper right to lower left."""
MARGIN = 1
"""Pixels by which a panel exceeds the covered object on each side."""

_OFFSET = 3_000_017
"""Separates the draws of backgrounds from all others with the same seed."""
_JITTER = np.arange(-LARGEST_JITTER, LARGEST_JITTER + 1)[:, None, None]
_SHADES = np.clip(np.array(list(COLOURS.values()))[None] + _JITTER, 0, 255).astype(np.uint8)


@dataclass(frozen=True, eq=False)
class DrawnClip(Story):
    """A drawn clip: its story, and pixels ``(T, 96, 96, 3)`` uint8."""

    frames: np.ndarray

    @cached_property
    def patches(self) -> np.ndarray:
        """Number of the track of each patch's object ``(T, 144)``, or -1.

        An object owns a patch if it, or its panel while covered, fills 12 or more of the patch's pixels.
        """
        owner = np.full((len(self.frames), GRID, GRID), -1, np.int64)
        best = np.zeros(owner.shape, np.int64)
        for number, track in enumerate(self.tracks):
            x0, y0, x1, y1 = track.box.T
            area = _overlap(y0, y1)[:, :, None] * _overlap(x0, x1)[:, None, :]
            wins = (area >= MIN_OVERLAP) & (area > best)
            owner[wins], best[wins] = number, area[wins]
        return owner.reshape(len(owner), GRID * GRID)


def _overlap(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the pixels of ``[low, high)`` in each line of patches ``(T, 12)``."""
    edge = np.arange(GRID)[None] * PATCH
    shared: np.ndarray = np.minimum(high[:, None], edge + PATCH) - np.maximum(low[:, None], edge)
    return shared.clip(0, PATCH)


def clip(split: str, seed: int, index: int, frames: int = 32) -> DrawnClip:
    """Return a drawn clip, with pixels and events determined by the arguments.

    Args:
        split: "train", "val" or "test".
        seed: Non-negative seed.
        index: Number of the clip.
        frames: T, 8 to 112.

    Raises:
        ValueError: An invalid number of frames.
    """
    story = tell(split, seed, index, frames)
    row = draws(seed + _OFFSET, split, [index], 16 + 5 * MAX_CLUTTER)[0]
    pixels = _background(DrawStream(row), frames)
    for track in story.tracks:
        for frame in np.flatnonzero(track.colour >= 0).tolist():
            _draw(pixels[frame], track, frame, split)
    return DrawnClip(split, seed, index, frames, story.tracks, story.events, pixels)


@lru_cache(maxsize=1)
def _digits() -> Digits:
    return Digits()


@lru_cache(maxsize=1)
def _noise() -> np.ndarray:
    return noise_bank()


@lru_cache(maxsize=64)
def _mask(thing: str, size: int) -> np.ndarray:
    return shape_mask(thing, size)


def _background(stream: DrawStream, frames: int) -> np.ndarray:
    """Return tinted noise and grey clutter ``(T, 96, 96, 3)`` that slide and change in light."""
    field = stream.below(8)
    # The noise has an offset of 30; with the swing of the light every sum stays within 2..128.
    level = 20 + stream.below(30)
    tint = np.array([stream.below(17) - 8 for _ in range(3)])
    world = _noise()[field].copy()
    for _ in range(4 + stream.below(MAX_CLUTTER - 3)):
        y, x = stream.below(WORLD - 6), stream.below(WORLD - 6)
        height, width = 1 + stream.below(6), 1 + stream.below(6)
        world[y : y + height, x : x + width] = 70 + stream.below(90) - level
    # Sixteenths of a pixel per frame; a backward slide starts at the far end.
    slide = [stream.below(9) - 4 for _ in range(2)]
    start = [stream.below(5) if step >= 0 else WORLD - WIDTH - stream.below(5) for step in slide]
    swing, turns = stream.below(21) - 10, 1 + stream.below(2)
    lines = world.reshape(WORLD, -1)
    pixels = np.empty((frames, WIDTH, WIDTH, 3), np.uint8)
    for frame in range(frames):
        y, x = (first + frame * step // 16 for first, step in zip(start, slide, strict=True))
        # A triangle wave from 0 over `swing` back to 0, once or twice in a clip.
        phase = frame * turns * 128 // frames % 128
        light = level + swing * min(phase, 128 - phase) // 64
        # Pixels and colours flattened: additions over an axis of three colours take ten times as long.
        window = lines[y : y + WIDTH, 3 * x : 3 * (x + WIDTH)]
        offset = np.tile((light + tint).astype(np.uint8), WIDTH)
        np.add(window, offset, out=pixels[frame].reshape(WIDTH, -1))
    return pixels


def _draw(picture: np.ndarray, track: Track, frame: int, split: str) -> None:
    """Draw one object, or the panel over it, into a frame ``(96, 96, 3)`` in place."""
    x0, y0, x1, y1 = track.box[frame].tolist()
    if track.covered[frame]:
        top, left = max(y0 - MARGIN, 0), max(x0 - MARGIN, 0)
        region = picture[top : y1 + MARGIN, left : x1 + MARGIN]
        row, column = np.indices(region.shape[:2])
        region[:] = np.where((row + column) // 4 % 2, *PANEL)[:, :, None]
        return
    region = picture[y0:y1, x0:x1]
    colour = _SHADES[track.jitter + LARGEST_JITTER, track.colour[frame]]
    if track.thing != "frame":
        region[_mask(track.thing, track.size)] = colour
        return
    pool = _digits().pools[split][track.digit[frame]]
    sprite = _digits().sprites[track.size][pool[track.draw[frame] % len(pool)]]
    border = FRAME - 1
    region[:] = colour
    region[border:-border, border:-border] = 16
    grey = 16 + sprite * (track.stroke - 16) // 255
    region[FRAME:-FRAME, FRAME:-FRAME] = grey[:, :, None]
