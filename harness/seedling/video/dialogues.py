"""Questions about clips with unique answers, each a pure function of the clip and a stream of draws.

An answer that depends on several observations names them first: the object at each place before the count, the times of
two events before their order. The model looks up one word at a time, and compares the words it has already generated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from espalier.harness.seedling.counter_random import DrawStream, draws
from espalier.harness.seedling.scenes import CELL
from espalier.harness.seedling.video.events import (
    PLACES,
    QUESTION,
    Event,
    Story,
    Track,
    caption,
    clause,
    object_name,
    time_word,
)
from espalier.harness.seedling.vocabulary import box_text

FAMILIES = ("what", "where", "how_many", "order", "when", "digits", "find", "caption")
COUNTS = {
    "what": 4,
    "where": 2,
    "how_many": 2,
    "order": 3,
    "when": 2,
    "digits": 1,
    "find": 3,
    "caption": 1,
}
"""Number of training questions of each family about a clip."""

_OFFSET = 4_000_037
_DRAWS = 512


class Dialogue(NamedTuple):
    """A question with its only correct answer, as words separated by spaces.

    Attributes:
        family: One of :data:`FAMILIES`.
        question: Question, without the chat format.
        answer: Answer.
        template: Template within the family.
        target: The event to find; only in the family "find".
        shows: (frame, number of the track) of the required observations: one for each sentence of a caption, each digit
            and each counted thing, in the order of the answer; two for an order, the event in the question and the one
            in the answer; else one.
    """

    family: str
    question: str
    answer: str
    template: str
    target: Event | None = None
    shows: tuple[tuple[int, int], ...] = ()


def later(story: Story) -> list[Event]:
    """Return the events after the first frame."""
    return [event for event in story.events if event.kind != "present"]


def named_once(story: Story) -> list[Event]:
    """Return the events with a unique clause in the clip."""
    clauses = Counter(clause(event) for event in later(story))
    return [event for event in later(story) if clauses[clause(event)] == 1]


def _at(story: Story, thing: str | None = None) -> list[tuple[int, int]]:
    """Return (frame, track) of all visible objects at rest, or of those named `thing`."""
    positions = []
    for number, track in enumerate(story.tracks):
        if thing is None or track.thing == thing:
            at_rest = (track.place >= 0) & ~track.covered
            positions += [(frame, number) for frame in np.flatnonzero(at_rest).tolist()]
    return positions


def _happens_alone(story: Story, event: Event) -> bool:
    """Return whether no other object moves, or is covered, in the frame of a move or cover."""
    tracks = [track for number, track in enumerate(story.tracks) if number != event.track]
    if event.kind == "move":
        return not any(t.present(event.frame) and t.place[event.frame] < 0 for t in tracks)
    return event.kind != "cover" or not any(track.covered[event.frame] for track in tracks)


def _shows(*events: Event) -> tuple[tuple[int, int], ...]:
    return tuple((event.frame, event.track) for event in events)


def what_question(story: Story, stream: DrawStream) -> Dialogue:
    """Return a question for the object of an event or at a place, or for a digit or new colour at a time."""
    choice = stream.below(4)
    digits = _at(story, "frame")
    single_events = [event for event in later(story) if _happens_alone(story, event)]
    if choice == 0 and single_events:
        event = stream.pick(single_events)
        acts = clause(event).removeprefix(f"the {object_name(event)} ")
        return Dialogue(
            "what",
            f"what {acts} at time {time_word(event.frame)} ?",
            object_name(event),
            "event",
            shows=_shows(event),
        )
    if choice == 1 and digits:
        frame, number = stream.pick(digits)
        track = story.tracks[number]
        return Dialogue(
            "what",
            f"what digit is in the {track.name(frame)} at time {time_word(frame)} ?",
            str(track.digit[frame]),
            "digit",
            shows=((frame, number),),
        )
    turns = [event for event in later(story) if event.kind == "turn"]
    if choice == 2 and turns:
        event = stream.pick(turns)
        return Dialogue(
            "what",
            f"the {object_name(event)} turns to what colour at time {time_word(event.frame)} ?",
            event.outcome,
            "colour",
            shows=_shows(event),
        )
    frame, number = stream.pick(_at(story))
    track = story.tracks[number]
    return Dialogue(
        "what",
        f"what is at the {PLACES[track.place[frame]]} at time {time_word(frame)} ?",
        track.name(frame),
        "place",
        shows=((frame, number),),
    )


def where_question(story: Story, stream: DrawStream) -> Dialogue:
    """Return a question for the place of an object at a time."""
    frame, number = stream.pick(_at(story))
    track = story.tracks[number]
    return Dialogue(
        "where",
        f"where is the {track.name(frame)} at time {time_word(frame)} ?",
        PLACES[track.place[frame]],
        "place",
        shows=((frame, number),),
    )


def counting_question(story: Story, stream: DrawStream) -> Dialogue:
    """Return a question for the number of visible digits, shapes or objects; the answer lists all places first."""
    template = stream.pick(("digits", "shapes", "objects"))
    frame = stream.below(story.length)
    numbers = {
        _place(track, frame): number
        for number, track in enumerate(story.tracks)
        if track.visible(frame)
        and template in ("objects", "digits" if track.thing == "frame" else "shapes")
    }
    parts = [
        f"{name} {story.tracks[numbers[place]].name(frame) if place in numbers else 'no'}"
        for place, name in enumerate(PLACES)
    ]
    text = f"how many {template} are there at time {time_word(frame)} ?"
    answer = " ".join([*parts, str(len(numbers))])
    shows = tuple((frame, numbers[place]) for place in sorted(numbers))
    return Dialogue("how_many", text, answer, template, shows=shows)


def _place(track: Track, frame: int) -> int:
    """Return the place of an object's centre, also during a move; no two objects share a place."""
    x1, y1, x2, y2 = map(int, track.box[frame])
    return 3 * ((y1 + y2) // 2 // CELL) + (x1 + x2) // 2 // CELL


def order_question(story: Story, stream: DrawStream) -> Dialogue:
    """Return a question for the order of two events or for the next event, or a count if there are too few events.

    The answer starts with the times of both events.
    """
    events = named_once(story)
    places = {id(event): number for number, event in enumerate(story.events)}
    followed = [event for event in events if places[id(event)] + 1 < len(story.events)]
    if not followed or len(events) < 2:
        return counting_question(story, stream)
    if stream.below(2):
        first = stream.below(len(events))
        second = stream.below(len(events) - 1)
        event, reference = events[first], events[second + (second >= first)]
        text = f"is it before or after {clause(reference)} that {clause(event)} ?"
        order = "before" if event.frame < reference.frame else "after"
        return Dialogue(
            "order",
            text,
            f"{time_word(event.frame)} {time_word(reference.frame)} {order}",
            "before_after",
            shows=_shows(event, reference),
        )
    event = stream.pick(followed)
    text = f"what happens next after {clause(event)} ?"
    after = story.events[places[id(event)] + 1]
    return Dialogue(
        "order",
        text,
        f"{time_word(event.frame)} {time_word(after.frame)} {clause(after)}",
        "next",
        shows=_shows(event, after),
    )


def when_question(story: Story, stream: DrawStream) -> Dialogue:
    """Return a question for the time of an event, or a count if no event has a unique name."""
    events = named_once(story)
    if not events:
        return counting_question(story, stream)
    event = stream.pick(events)
    return Dialogue(
        "when",
        f"what is the time when {clause(event)} ?",
        time_word(event.frame),
        event.kind,
        shows=_shows(event),
    )


def digits_question(story: Story, stream: DrawStream) -> Dialogue:
    """Return the question for all digits in order of appearance, each after its time; reads no draws."""
    new = [
        event
        for event in story.events
        if event.kind == "change" or (event.kind in ("present", "enter") and event.digit)
    ]
    text = " ".join(
        f"{time_word(event.frame)} {event.outcome if event.kind == 'change' else event.digit}"
        for event in new
    )
    return Dialogue(
        "digits",
        "read the time and digit of all digits in order .",
        text,
        "read_digits",
        shows=_shows(*new),
    )


def find_question(story: Story, stream: DrawStream) -> Dialogue:
    """Return a question for the moment and box of an event, or a count if no event has a unique name."""
    events = named_once(story)
    if not events:
        return counting_question(story, stream)
    event = stream.pick(events)
    return Dialogue(
        "find",
        f"find when and where {clause(event)} .",
        f"{time_word(event.frame)} {box_text(event.box)}",
        event.kind,
        event,
        _shows(event),
    )


def caption_question(story: Story, stream: DrawStream) -> Dialogue:
    """Return the question for all events; reads no draws."""
    return Dialogue(
        "caption", QUESTION, caption(story.events), "describe", shows=_shows(*story.events)
    )


MAKERS: dict[str, Callable[[Story, DrawStream], Dialogue]] = {
    "what": what_question,
    "where": where_question,
    "how_many": counting_question,
    "order": order_question,
    "when": when_question,
    "digits": digits_question,
    "find": find_question,
    "caption": caption_question,
}


def dialogue_stream(story: Story) -> DrawStream:
    """Return the stream of draws for questions about a clip, fixed by its address."""
    return DrawStream(draws(story.seed + _OFFSET, story.split, [story.index], _DRAWS)[0])


def dialogues(
    story: Story, stream: DrawStream, counts: Mapping[str, int] = COUNTS
) -> list[Dialogue]:
    """Return questions about a clip with their answers, in the order of :data:`FAMILIES`.

    Args:
        story: A clip or its story.
        stream: Draws, as of :func:`dialogue_stream`.
        counts: Questions of each family; missing families get none.
    """
    return [
        MAKERS[family](story, stream) for family in FAMILIES for _ in range(counts.get(family, 0))
    ]
