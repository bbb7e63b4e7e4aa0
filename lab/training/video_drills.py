"""Training dialogues about clips: those of the benchmarks, and simpler one-hop lookups."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from espalier.harness.seedling.counter_random import DrawStream, draws
from espalier.harness.seedling.scenes import COLOUR_NAMES
from espalier.harness.seedling.video.clips import DrawnClip
from espalier.harness.seedling.video.dialogues import dialogues, named_once
from espalier.harness.seedling.video.events import PLACES, clause, time_word

_OFFSET = 5_000_011
"""Separates these draws from those of clips and of the benchmarks' questions."""
_DRAWS = 4096


class Talk(NamedTuple):
    """A question and its answer as words; in the family "drill" a key and its result.

    The answer's content is given as (frame, track number), as in a dialogue. The answer may continue words
    that are already given in `beginning`, correct or not.
    """

    family: str
    question: str
    answer: str
    shows: tuple[tuple[int, int], ...] = ()
    beginning: str = ""


def talks_about(clip: DrawnClip, visit: int, counts: dict[str, int], drills: int) -> list[Talk]:
    """Returns dialogues about a clip, different at each visit.

    Args:
        clip: The clip.
        visit: Number of earlier visits to the clip.
        counts: Questions of each family; "goes_on" are captions and digits that continue a given beginning.
        drills: Lookups of each kind.
    """
    address = clip.index * 64 + visit
    if len(named_once(clip)) < 2:  # a short clip may have too few objects for questions
        counts = {f: n for f, n in counts.items() if f not in ("order", "when", "find")}
    stream = DrawStream(draws(clip.seed + _OFFSET, clip.split, [address], _DRAWS)[0])
    talks = [Talk(*dialogue[:3], dialogue.shows) for dialogue in dialogues(clip, stream, counts)]
    for number in range(counts.get("goes_on", 0)):
        family = ("caption", "digits")[number % 2]
        (dialogue,) = dialogues(clip, stream, {family: 1})
        talks.append(_gone_on(Talk(*dialogue[:3], dialogue.shows), stream))
    for _ in range(drills):
        talks += [_object_at(clip, stream), _place_at(clip, stream), _begins_at(clip, stream)]
    return talks


def _gone_on(talk: Talk, stream: DrawStream) -> Talk:
    """Cuts a long answer and corrupts the part before the cut, except for the last element.

    A model trained only on correct answers loses its place with its first mistake: it goes back in time, or repeats one
    event until the length limit. Of the parts before the last one, a third is removed and a sixth duplicated,
    and in a quarter of all parts one word other than the time is replaced.
    """
    words = talk.answer.split()
    size = 2 if talk.family == "digits" else 0
    ends = (
        range(size, len(words) + 1, size)
        if size
        else [place + 1 for place, word in enumerate(words) if word == ";"]
    )
    parts = [words[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    cut = 1 + stream.below(len(parts))
    beginning: list[str] = []
    for number, part in enumerate(parts[:cut]):
        fate = stream.below(12)
        if number < cut - 1 and fate < 4:
            continue
        copies = 1 + (fate in (4, 5))
        copied = _misread(part, parts, stream) if stream.below(4) == 0 else part
        beginning += copied * copies
    remaining = [word for part in parts[cut:] for word in part]
    return talk._replace(
        answer=" ".join(remaining), shows=talk.shows[cut:], beginning=" ".join(beginning)
    )


def _misread(part: list[str], parts: list[list[str]], stream: DrawStream) -> list[str]:
    """Returns a part with one word other than the time replaced by that of another part."""
    time = next(place for place, word in enumerate(part) if word[0] == "t" and word[1:].isdigit())
    donor = stream.pick(parts)
    places = range(time + 1, min(len(part), len(donor)) - (part[-1] == ";"))
    if not places:
        return part
    place = stream.pick(places)
    return [*part[:place], donor[place], *part[place + 1 :]]


def _resting(clip: DrawnClip, stream: DrawStream) -> tuple[int, int]:
    """Draws a (frame, track) of a visible object at rest."""
    still = np.array([(track.place >= 0) & ~track.covered for track in clip.tracks])
    tracks, frames = np.nonzero(still)
    chosen = stream.below(len(tracks))
    return int(frames[chosen]), int(tracks[chosen])


def _object_at(clip: DrawnClip, stream: DrawStream) -> Talk:
    """Time and colour, then the object with that colour and its place; "no" for an absent colour."""
    frame, number = _resting(clip, stream)
    colours = {int(t.colour[frame]) for t in clip.tracks if t.present(frame)}
    if stream.below(4) == 0:
        absent = stream.pick([c for c in range(len(COLOUR_NAMES)) if c not in colours])
        return Talk("drill", f"{time_word(frame)} {COLOUR_NAMES[absent]}", "no")
    track = clip.tracks[number]
    digit = f" {track.digit[frame]}" if track.digit[frame] >= 0 else ""
    place = PLACES[track.place[frame]]
    key = f"{time_word(frame)} {COLOUR_NAMES[track.colour[frame]]}"
    return Talk("drill", key, f"{track.thing}{digit} {place}", ((frame, number),))


def _place_at(clip: DrawnClip, stream: DrawStream) -> Talk:
    """Time and place, then the object there."""
    frame, number = _resting(clip, stream)
    track = clip.tracks[number]
    key = f"{time_word(frame)} {PLACES[track.place[frame]]}"
    return Talk("drill", key, track.name(frame), ((frame, number),))


def _begins_at(clip: DrawnClip, stream: DrawStream) -> Talk:
    """Time, then the event that begins; "no" where none does."""
    later = [event for event in clip.events if event.kind != "present"]
    if stream.below(3) == 0:
        busy = {event.frame for event in later}
        calm = [frame for frame in range(1, clip.length) if frame not in busy]
        if calm:
            return Talk("drill", f"{time_word(stream.pick(calm))} happens", "no")
    event = stream.pick(later)
    key = f"{time_word(event.frame)} happens"
    return Talk("drill", key, clause(event), ((event.frame, event.track),))
