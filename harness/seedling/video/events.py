"""Data of a clip's story: events, and the tracks of objects through the frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from espalier.harness.seedling import vocabulary
from espalier.harness.seedling.scenes import BOX, COLOUR_NAMES
from espalier.harness.seedling.vocabulary import VOCABULARY

MOST_FRAMES = 112
"""Number of time words; 112 frames of 144 tokens are 16,128."""

ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
PLACES = tuple(f"{row} {column}" for row in ROWS for column in COLUMNS)
"""The nine places of a frame, in reading order."""

# fmt: off
_NEW = (
    "<video>", "video", "time", "when", "find", "and", "it", "that", "before", "after", "or",
    "happens", "next", "enters", "leaves", "moves", "turns", "changes", "covered", "seen", "again",
    "from", "to", "order",
)
# fmt: on
_SIZE = 256
_KNOWN = (*VOCABULARY, *_NEW, *ROWS, *COLUMNS, *(f"t{frame}" for frame in range(MOST_FRAMES)))
WORDS: tuple[str, ...] = (
    *_KNOWN,
    *(f"<spare_{number}>" for number in range(_SIZE - len(_KNOWN))),
)
TOKEN_ID: dict[str, int] = {word: number for number, word in enumerate(WORDS)}
VIDEO = TOKEN_ID["<video>"]
FIRST_TIME = TOKEN_ID["t0"]


#: Returns the token ids of space-separated words; unknown words become ``<unk>``.
encode = partial(vocabulary.encode, token_ids=TOKEN_ID)


def time_word(frame: int) -> str:
    """Return the word for the time of a frame, counted from 0."""
    return f"t{frame}"


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


QUESTION = "describe the video ."


def object_name(event: Event) -> str:
    """Return the name of an event's object before the event: "red star", "blue frame"."""
    return f"{event.colour} {event.thing}"


def sentence(event: Event) -> str:
    """Return the caption's sentence about an event."""
    thing, place = object_name(event), f"the {event.place}"
    new = f"a {thing}" + (f" with digit {event.digit}" if event.digit else "")
    clauses = {
        "present": f"there is {new} at {place}",
        "enter": f"{new} enters at {place}",
        "leave": f"the {thing} leaves from {place}",
        "move": f"the {thing} moves from {place} to the {event.outcome}",
        "turn": f"the {thing} at {place} turns {event.outcome}",
        "cover": f"the {thing} at {place} is covered",
        "uncover": f"the {thing} at {place} is seen again",
        "change": f"the {thing} at {place} changes from digit {event.digit} to digit {event.outcome}",
    }
    return f"at time {time_word(event.frame)} {clauses[event.kind]} ;"


def caption(events: Sequence[Event]) -> str:
    """Return the caption of a clip, its only correct answer."""
    return " ".join(sentence(event) for event in events)


def clause(event: Event) -> str:
    """Return an event's name in questions, without time and place: "the red star leaves"."""
    acts = {
        "enter": "enters",
        "leave": "leaves",
        "move": "moves",
        "turn": f"turns {event.outcome}",
        "cover": "is covered",
        "uncover": "is seen again",
        "change": f"changes to digit {event.outcome}",
    }
    return f"the {object_name(event)} {acts[event.kind]}"
