"""The story of a clip: objects on a grid of nine places, and one event at a time.

A story is a pure function of (split, seed, index, frames) in integer arithmetic, like a scene.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from espalier.harness.seedling.counter_random import DrawStream, draws
from espalier.harness.seedling.scenes import BOX, CELL, COLOUR_NAMES
from espalier.harness.seedling.sprites import SHAPES, SIZES
from espalier.harness.seedling.video.clip_vocabulary import MOST_FRAMES, PLACES
from espalier.harness.seedling.video.events import Event, Story, Track


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

_OFFSET = 2_000_003
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
    row = draws(seed + _OFFSET, split, [index], 256 + 24 * frames)[0]
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
        cells = sorted(self._sample(list(range(len(PLACES))), 3 + stream.below(3)))
        for number, cell in enumerate(cells):
            # First a shape, then a digit, so that every clip has both.
            self._add("present", 0, cell, number if number < 2 else stream.below(2))

    def _sample(self, items: list[int], count: int) -> list[int]:
        return [items.pop(self.stream.below(len(items))) for _ in range(count)]

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
        happenings: dict[str, Callable[[int, int], None]] = {
            "enter": self._enter,
            "leave": self._leave,
            "move": self._move,
            "turn": self._turn,
            "cover": self._cover,
            "uncover": self._uncover,
            "change": self._change,
        }
        happenings[kind](frame, self.stream.pick(overdue or able[kind]))

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

    def _enter(self, frame: int, cell: int) -> None:
        self._add("enter", frame, cell, self.stream.below(2))

    def _leave(self, frame: int, number: int) -> None:
        self._note("leave", frame, number)
        self.actors[number].present = False

    def _move(self, frame: int, number: int) -> None:
        actor = self.actors[number]
        cell = self.stream.pick(self._neighbours(actor.cell))
        self._note("move", frame, number, PLACES[cell])
        (x, y), (to_x, to_y) = actor.at, self._spot(cell, actor.track.size)
        steps = range(1, STRIDE + 1)
        path = [(x + (to_x - x) * k // STRIDE, y + (to_y - y) * k // STRIDE) for k in steps]
        actor.at, actor.path = path[0], path[1:]
        actor.previous_cell, actor.cell, actor.ready = actor.cell, cell, frame + STRIDE + REST - 1

    def _turn(self, frame: int, number: int) -> None:
        colour = self.stream.pick(self._free_colours())
        self._note("turn", frame, number, COLOUR_NAMES[colour])
        self.actors[number].colour = colour
        self.actors[number].ready = frame + REST

    def _cover(self, frame: int, number: int) -> None:
        self._note("cover", frame, number)
        self.actors[number].covered_at = frame
        self.actors[number].ready = frame + REST

    def _uncover(self, frame: int, number: int) -> None:
        self._note("uncover", frame, number)
        self.actors[number].covered_at = -1
        self.actors[number].ready = frame + REST

    def _change(self, frame: int, number: int) -> None:
        actor = self.actors[number]
        digit = self.stream.pick([value for value in range(10) if value != actor.digit])
        self._note("change", frame, number, str(digit))
        actor.digit, actor.draw = digit, self.stream.below(1 << 20)
        actor.ready = frame + REST
