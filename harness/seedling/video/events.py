"""What a clip's story is told in: events, and the tracks of objects through the frames."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from espalier.harness.seedling.scenes import BOX, COLOUR_NAMES

KINDS = ("present", "enter", "leave", "move", "turn", "cover", "uncover", "change")
"""What an event may be; "present" is what the first frame shows."""


@dataclass(frozen=True)
class Event:
    """One thing that happens to one object.

    Attributes:
        kind: One of :data:`KINDS`.
        frame: The first frame that shows it.
        track: Number of the object.
        colour: Its colour before the event, by which it is named.
        thing: "frame" for a framed digit, otherwise the shape's name.
        place: One of the nine places: where it is, or was before it moved or left.
        box: Where it is seen at this event: in the frame before where it leaves, moves or is
            covered, in the frame of the event otherwise.
        digit: The digit it shows before the event; "" for shapes.
        outcome: The new colour of a turn, the new digit of a change, the new place of a move; else "".
    """

    kind: str
    frame: int
    track: int
    colour: str
    thing: str
    place: str
    box: BOX
    digit: str = ""
    outcome: str = ""


@dataclass
class Track:
    """One object through a clip of T frames.

    Attributes:
        thing: "frame" for a framed digit, otherwise the shape's name.
        size: Side in pixels.
        stroke: Grey of a digit's lines.
        jitter: What is added to its colour.
        box: Pixels ``(T, 4)``, x1 and y1 exclusive; -1 where it is not there. Kept while covered.
        colour: Colour number ``(T,)``, -1 where it is not there.
        digit: Digit shown ``(T,)``, -1 for shapes.
        draw: Number drawn to choose the image of its digit ``(T,)``.
        covered: Whether a panel hides it ``(T,)``.
        place: Number of its place ``(T,)``; -1 while it moves or is not there.
    """

    thing: str
    size: int
    stroke: int
    jitter: int
    box: np.ndarray
    colour: np.ndarray
    digit: np.ndarray
    draw: np.ndarray
    covered: np.ndarray
    place: np.ndarray

    def present(self, frame: int) -> bool:
        """Returns whether the object is in the picture, covered or not."""
        return int(self.colour[frame]) >= 0

    def visible(self, frame: int) -> bool:
        """Returns whether the object can be seen."""
        return self.present(frame) and not self.covered[frame]

    def name(self, frame: int) -> str:
        """Names the object as it is in a frame, by colour: "red star", "blue frame"."""
        return f"{COLOUR_NAMES[self.colour[frame]]} {self.thing}"


@dataclass(frozen=True, eq=False)
class Story:
    """What happens in a clip, without its pixels.

    Attributes:
        split: "train", "val" or "test": which digit images are shown.
        seed: Seed of the clip.
        index: Number of the clip.
        length: Frames, T.
        tracks: The objects, in the order in which they come.
        events: What happens, in order of time; those of the first frame in reading order.
    """

    split: str
    seed: int
    index: int
    length: int
    tracks: tuple[Track, ...]
    events: tuple[Event, ...]
