"""Dialogues about clips for training: those of the benchmarks, and one-hop lookups that come before them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.seedling.hashing import DrawStream, draws
from harness.seedling.scenes import COLOUR_NAMES
from harness.seedling.video.captions import clause
from harness.seedling.video.clips import Clip
from harness.seedling.video.dialogues import dialogues, named_once
from harness.seedling.video.vocabulary import PLACES, time_word

_OFFSET = 5_000_011
"""Keeps these draws apart from those of clips and of the benchmarks' questions."""
_DRAWS = 4096


class Talk(NamedTuple):
    """A question and its answer, in words; of the family "drill" a key and what follows from it.

    What the answer tells is shown by (frame, number of the track), as in a dialogue.
    """

    family: str
    question: str
    answer: str
    shows: tuple[tuple[int, int], ...] = ()


def talks_about(clip: Clip, visit: int, counts: dict[str, int], drills: int) -> list[Talk]:
    """Returns dialogues about a clip: another choice at each visit.

    Args:
        clip: The clip.
        visit: How often the clip has been shown before.
        counts: Questions of each family.
        drills: Lookups of each kind.
    """
    address = clip.index * 64 + visit
    if len(named_once(clip)) < 2:  # a short clip may have too little to ask about
        counts = {f: n for f, n in counts.items() if f not in ("order", "when", "find")}
    stream = DrawStream(draws(clip.seed + _OFFSET, clip.split, [address], _DRAWS)[0])
    talks = [Talk(*found[:3], found.shows) for found in dialogues(clip, stream, counts)]
    for _ in range(drills):
        talks += [_object_at(clip, stream), _place_at(clip, stream), _begins_at(clip, stream)]
    return talks


def _resting(clip: Clip, stream: DrawStream) -> tuple[int, int]:
    """Draws a (frame, track) of an object that can be seen and does not move."""
    still = np.array([(track.place >= 0) & ~track.covered for track in clip.tracks])
    tracks, frames = np.nonzero(still)
    chosen = stream.below(len(tracks))
    return int(frames[chosen]), int(tracks[chosen])


def _object_at(clip: Clip, stream: DrawStream) -> Talk:
    """Time and colour, then what has that colour and where it is; "no" for a colour that is not seen."""
    frame, number = _resting(clip, stream)
    seen = {int(t.colour[frame]) for t in clip.tracks if t.there(frame)}
    if stream.below(4) == 0:
        absent = stream.pick([c for c in range(len(COLOUR_NAMES)) if c not in seen])
        return Talk("drill", f"{time_word(frame)} {COLOUR_NAMES[absent]}", "no")
    track = clip.tracks[number]
    digit = f" {track.digit[frame]}" if track.digit[frame] >= 0 else ""
    place = PLACES[track.place[frame]]
    key = f"{time_word(frame)} {COLOUR_NAMES[track.colour[frame]]}"
    return Talk("drill", key, f"{track.thing}{digit} {place}", ((frame, number),))


def _place_at(clip: Clip, stream: DrawStream) -> Talk:
    """Time and place, then what is there."""
    frame, number = _resting(clip, stream)
    track = clip.tracks[number]
    key = f"{time_word(frame)} {PLACES[track.place[frame]]}"
    return Talk("drill", key, track.name(frame), ((frame, number),))


def _begins_at(clip: Clip, stream: DrawStream) -> Talk:
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
