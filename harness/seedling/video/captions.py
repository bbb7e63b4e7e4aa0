"""Captions: all events of a clip in order, with time, object and place."""

from __future__ import annotations

from collections.abc import Sequence

from espalier.harness.seedling.video.clip_vocabulary import time_word
from espalier.harness.seedling.video.events import Event

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
