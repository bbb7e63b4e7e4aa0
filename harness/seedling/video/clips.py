"""Generated clips: the objects of seedling's scenes, moving over a slowly changing background.

A clip is a pure function of (split, seed, index, frames) in integer arithmetic, so pixels are the same
on every machine and need not be stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from espalier.harness.seedling.counter_random import DrawStream, draws
from espalier.harness.seedling.scenes import (
    BOX,
    CELL,
    COLOUR_NAMES,
    GRID,
    MAX_CLUTTER,
    MIN_OVERLAP,
    PATCH,
    RGB,
    SHAPES,
    SIZES,
    WIDTH,
    digits,
    draw_clutter,
    draw_digit,
    noise_bank,
    shape_mask,
    sprites,
)
from espalier.harness.seedling.video.events import MOST_FRAMES, PLACES, Event, Story, Track


@dataclass
class Actor:
    """The current state of one object.

    Attributes:
        track: Its states by frame, written by `record`.
        cell: Number of its place, or of the destination of a move.
        colour: Number of its colour.
        digit: Its digit, -1 for shapes.
        draw: Number that selects the digit's image.
        at: Its upper left corner.
        ready: First frame in which the next event may happen to it.
        path: Remaining corners of a move.
        previous_cell: Number of the place it last moved from, -1 before the first move.
        covered_at: Frame in which a panel covered it, -1 if uncovered.
        present: Whether it is in the picture.
    """

    track: Track
    cell: int
    colour: int
    digit: int
    draw: int
    at: tuple[int, int]
    ready: int
    path: list[tuple[int, int]] = field(default_factory=list)
    previous_cell: int = -1
    covered_at: int = -1
    present: bool = True

    @property
    def box(self) -> BOX:
        """Its pixels, x1 and y1 exclusive."""
        x, y = self.at
        return (x, y, x + self.track.size, y + self.track.size)

    def glide(self) -> None:
        """Advance a move by one frame, if there is one."""
        if self.path:
            self.at = self.path.pop(0)

    def record(self, frame: int) -> None:
        """Write the state to the track, if the object is in the picture."""
        if not self.present:
            return
        track = self.track
        track.box[frame] = self.box
        track.colour[frame], track.digit[frame] = self.colour, self.digit
        track.draw[frame] = self.draw
        track.covered[frame] = self.covered_at >= 0
        track.place[frame] = -1 if self.path else self.cell


MOST_OBJECTS = 6
LEAST_OBJECTS = 2
REST = 3
"""Minimum frames between two events of an object, so that each state is visible."""
STRIDE = 3
"""Frames of a move to a neighbouring place."""
LONGEST_COVER = 6
LARGEST_JITTER = 12

_STORY_OFFSET = 2_000_003
"""Separates the draws of stories from those of scenes and questions with the same seed."""
_WEIGHTS = {"enter": 4, "leave": 3, "move": 5, "turn": 4, "cover": 2, "uncover": 5, "change": 5}
_DENSITY = (16, 21)
"""Minimum and maximum number of events in the 31 frames after the first."""
_BUSY = 31
"""Frames after the first with that density; a longer clip has as many events, further apart."""


def tell(split: str, seed: int, index: int, frames: int) -> Story:
    """Return the story of a clip. After the first frame, each frame has at most one new event.

    Raises:
        ValueError: Fewer than 8 frames, or more than there are time words.
    """
    if not 8 <= frames <= MOST_FRAMES:
        raise ValueError(f"frames={frames}; valid: 8 to {MOST_FRAMES}")
    row = draws(seed + _STORY_OFFSET, split, [index], 256 + 24 * frames)[0]
    # No event in the last frame, so that all outcomes are visible for two frames.
    order = np.argsort(row[: frames - 2], kind="stable") + 1
    stream = DrawStream(row[frames:])
    low, high = _DENSITY
    count = (low + stream.below(high - low + 1)) * min(frames - 1, _BUSY) // _BUSY
    times = set(order[:count].tolist())
    teller = _Teller(frames, stream)
    for frame in range(frames):
        for actor in teller.actors:
            actor.glide()
        if frame in times:
            teller.happen(frame)
        for actor in teller.actors:
            actor.record(frame)
    tracks = tuple(actor.track for actor in teller.actors)
    return Story(split, seed, index, frames, tracks, tuple(teller.events))


class _Teller:
    """The state of a story, changed by one event at a time."""

    def __init__(self, frames: int, stream: DrawStream) -> None:
        self.frames, self.stream = frames, stream
        self.actors: list[Actor] = []
        self.events: list[Event] = []
        items = list(range(len(PLACES)))
        count = 3 + stream.below(3)
        cells = sorted([items.pop(self.stream.below(len(items))) for _ in range(count)])
        for number, cell in enumerate(cells):
            # First a shape, then a digit, so that every clip has both.
            self._add("present", 0, cell, number if number < 2 else stream.below(2))

    def _present(self) -> list[int]:
        return [number for number, actor in enumerate(self.actors) if actor.present]

    def _free_colours(self) -> list[int]:
        used = {self.actors[number].colour for number in self._present()}
        return [colour for colour in range(len(COLOUR_NAMES)) if colour not in used]

    def _free_cells(self) -> list[int]:
        present = [self.actors[number] for number in self._present()]
        # A place is free again once a moving object has left it completely.
        used = {actor.cell for actor in present} | {a.previous_cell for a in present if a.path}
        return [cell for cell in range(len(PLACES)) if cell not in used]

    def _neighbours(self, cell: int) -> list[int]:
        y, x = divmod(cell, 3)
        adjacent = [(y - 1, x), (y, x - 1), (y, x + 1), (y + 1, x)]
        free = self._free_cells()
        return [3 * a + b for a, b in adjacent if 0 <= a < 3 and 0 <= b < 3 and 3 * a + b in free]

    def _spot(self, cell: int, size: int) -> tuple[int, int]:
        """Draw the upper left corner of an object of this size within a place."""
        y, x = divmod(cell, 3)
        left, top = (self.stream.below(CELL - size + 1) for _ in range(2))
        return x * CELL + left, y * CELL + top

    def _add(self, kind: str, frame: int, cell: int, digital: int) -> None:
        stream, frames = self.stream, self.frames
        colour = stream.pick(self._free_colours())
        digit = stream.below(10) if digital else -1
        size = stream.pick(SIZES)
        track = Track(
            thing="frame" if digital else stream.pick(SHAPES),
            size=size,
            stroke=190 + stream.below(60),
            jitter=stream.below(2 * LARGEST_JITTER + 1) - LARGEST_JITTER,
            box=np.full((frames, 4), -1, np.int64),
            colour=np.full(frames, -1, np.int64),
            digit=np.full(frames, -1, np.int64),
            draw=np.zeros(frames, np.int64),
            covered=np.zeros(frames, bool),
            place=np.full(frames, -1, np.int64),
        )
        at = self._spot(cell, size)
        draw = stream.below(1 << 20)
        self.actors.append(Actor(track, cell, colour, digit, draw, at, frame + REST))
        self._note(kind, frame, len(self.actors) - 1)

    def _note(self, kind: str, frame: int, number: int, outcome: str = "") -> None:
        """Record an event, with the object's state before it."""
        actor = self.actors[number]
        self.events.append(
            Event(
                kind=kind,
                frame=frame,
                track=number,
                colour=COLOUR_NAMES[actor.colour],
                thing=actor.track.thing,
                place=PLACES[actor.cell],
                box=actor.box,
                digit=str(actor.digit) if actor.digit >= 0 else "",
                outcome=outcome,
            )
        )

    def happen(self, frame: int) -> None:
        """Apply one event, if any is possible."""
        able = self._able(frame)
        overdue = [n for n in able["uncover"] if frame - self.actors[n].covered_at >= LONGEST_COVER]
        kinds = [kind for kind in _WEIGHTS if able[kind]]
        if not kinds:
            return
        kind = self.stream.pick([kind for kind in kinds for _ in range(_WEIGHTS[kind])])
        kind = "uncover" if overdue else kind
        place = self.stream.pick(overdue or able[kind])
        if kind == "enter":
            self._add("enter", frame, place, self.stream.below(2))
            return
        outcome, changes = self._outcome(kind, frame, self.actors[place])
        self._note(kind, frame, place, outcome)
        self.actors[place] = replace(self.actors[place], **{"ready": frame + REST, **changes})

    def _outcome(self, kind: str, frame: int, actor: Actor) -> tuple[str, dict[str, Any]]:
        """Return the outcome of an event, and the object's new attributes."""
        stream = self.stream
        if kind == "turn":
            colour = stream.pick(self._free_colours())
            return COLOUR_NAMES[colour], {"colour": colour}
        if kind == "change":
            digit = stream.pick([value for value in range(10) if value != actor.digit])
            return str(digit), {"digit": digit, "draw": stream.below(1 << 20)}
        if kind == "move":
            cell = stream.pick(self._neighbours(actor.cell))
            (x, y), (to_x, to_y) = actor.at, self._spot(cell, actor.track.size)
            steps = range(1, STRIDE + 1)
            at, *path = (
                (x + (to_x - x) * k // STRIDE, y + (to_y - y) * k // STRIDE) for k in steps
            )
            places = {"cell": cell, "previous_cell": actor.cell, "at": at, "path": path}
            return PLACES[cell], {**places, "ready": frame + STRIDE + REST - 1}
        if kind == "leave":
            return "", {"present": False}
        return "", {"covered_at": frame if kind == "cover" else -1}

    def _able(self, frame: int) -> dict[str, list[int]]:
        """Return the possible objects of each kind of event in this frame."""
        present = self._present()
        idle = [n for n in present if self.actors[n].ready <= frame]
        bare = [n for n in idle if self.actors[n].covered_at < 0]
        room = len(present) < MOST_OBJECTS
        # The destination of a move must be visible before the clip ends.
        movers = bare if frame + STRIDE <= self.frames else []
        return {
            "enter": self._free_cells() if room else [],
            "leave": bare if len(present) > LEAST_OBJECTS else [],
            "move": [n for n in movers if self._neighbours(self.actors[n].cell)],
            "turn": bare,
            "cover": bare,
            "uncover": [n for n in idle if self.actors[n].covered_at >= 0],
            "change": [n for n in bare if self.actors[n].digit >= 0],
        }


WORLD = 128
"""Side of the background; a frame shows a sliding window of it."""
PANEL = (112, 72)
"""Greys of the panel over a covered object: diagonal stripes of 4 pixels, from upper right to lower left."""
MARGIN = 1
"""Pixels by which a panel exceeds the covered object on each side."""

_DRAWING_OFFSET = 3_000_017
"""Separates the draws of backgrounds from all others with the same seed."""
_JITTER = np.arange(-LARGEST_JITTER, LARGEST_JITTER + 1)[:, None, None]
_SHADES = np.clip(RGB[None] + _JITTER, 0, 255).astype(np.uint8)


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
    row = draws(seed + _DRAWING_OFFSET, split, [index], 16 + 5 * MAX_CLUTTER)[0]
    pixels = _background(DrawStream(row), frames)
    for track in story.tracks:
        for frame in np.flatnonzero(track.colour >= 0).tolist():
            _draw(pixels[frame], track, frame, split)
    return DrawnClip(split, seed, index, frames, story.tracks, story.events, pixels)


def _background(stream: DrawStream, frames: int) -> np.ndarray:
    """Return tinted noise and grey clutter ``(T, 96, 96, 3)`` that slide and change in light."""
    field = stream.below(8)
    # The noise has an offset of 30; with the swing of the light every sum stays within 2..128.
    level = 20 + stream.below(30)
    tint = np.array([stream.below(17) - 8 for _ in range(3)])
    world = noise_bank()[field].copy()
    draw_clutter(world, stream, 4 + stream.below(MAX_CLUTTER - 3), level)
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
        region[shape_mask(track.thing, track.size)] = colour
        return
    pool = digits().pools[split][track.digit[frame]]
    sprite = sprites(track.size)[pool[track.draw[frame] % len(pool)]]
    draw_digit(region, sprite, colour, track.stroke)
