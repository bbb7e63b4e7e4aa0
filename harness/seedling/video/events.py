"""Data of a clip's story: events, and the tracks of objects through the frames."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from espalier.harness.seedling.scenes import BOX, COLOUR_NAMES

KINDS = ("present", "enter", "leave", "move", "turn", "cover", "uncover", "change")
"""Kinds of events; "present" describes the first frame."""


@dataclass(frozen=True)
class Event:
    """One change of one object.

    Attributes:
        kind: One of :data:`KINDS`.
        frame: The first frame that shows the change.
        track: Number of the object.
        colour: Colour before the event, by which the object is named.
        thing: "frame" for a framed digit, otherwise the shape's name.
        place: One of the nine places: that of the object, or that before it moved or left.
        box: Its box in the frame before the event if it leaves, moves or is covered; otherwise in
            the frame of the event.
        digit: Digit before the event; "" for shapes.
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
        jitter: Offset of its colour.
        box: Pixels ``(T, 4)``, x1 and y1 exclusive; -1 while absent. Kept while covered.
        colour: Colour number ``(T,)``, -1 while absent.
        digit: Digit shown ``(T,)``, -1 for shapes.
        draw: Random number that selects the image of its digit ``(T,)``.
        covered: Whether a panel hides it ``(T,)``.
        place: Number of its place ``(T,)``; -1 while it moves or is absent.
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
        """Return whether the object is in the picture, covered or not."""
        return int(self.colour[frame]) >= 0

    def visible(self, frame: int) -> bool:
        """Return whether the object is in the picture and not covered."""
        return self.present(frame) and not self.covered[frame]

    def name(self, frame: int) -> str:
        """Return the object's name in a frame, by colour: "red star", "blue frame"."""
        return f"{COLOUR_NAMES[self.colour[frame]]} {self.thing}"


@dataclass(frozen=True, eq=False)
class Story:
    """The events of a clip, without its pixels.

    Attributes:
        split: "train", "val" or "test", which selects the digit images.
        seed: Seed of the clip.
        index: Number of the clip.
        length: Frames, T.
        tracks: The objects, in order of appearance.
        events: The events, in order of time; those of the first frame in reading order.
    """

    split: str
    seed: int
    index: int
    length: int
    tracks: tuple[Track, ...]
    events: tuple[Event, ...]
