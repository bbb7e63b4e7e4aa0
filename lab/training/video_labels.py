"""Labels for words of answers: the last mentioned time, and the parts of the event in question."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from espalier.harness.seedling.scenes import COLOUR_NAMES
from espalier.harness.seedling.video.events import FIRST_TIME, MOST_FRAMES, TOKEN_ID
from lab.training.dialogue_packs import IGNORE, Packed
from lab.training.video_drills import Talk

PARTS = ("colour", "thing", "act", "outcome")
"""Parts of an event's clause: "the red frame changes to digit 4" has all of them."""
ASKING = ("order", "when", "find")
"""Families with questions that name events by clauses."""

_TIMES = range(FIRST_TIME, FIRST_TIME + MOST_FRAMES)
_FOUND_BY_TIME = {
    *(*_TIMES, TOKEN_ID["no"]),
    *(TOKEN_ID[word] for word in (*map(str, range(10)), *COLOUR_NAMES)),
}
"""Words that are looked up by a time, besides the first of an answer."""


def asked_for(talks: Sequence[Sequence[Talk]], packed: Packed) -> dict[str, torch.Tensor]:
    """Returns the information that each of L words needs for predicting the next word; -1 for none.

    Args:
        talks: Per clip.
        packed: The same, packed.

    Returns:
        "last", the last time in the dialogue ``(B, L)``, and "asked", the :data:`PARTS` of the event with the time
        to be predicted ``(B, L, 4)``; all are word numbers.
    """
    tokens, labels = packed.tokens.numpy(), packed.labels.numpy()
    last = np.full(tokens.shape, -1)
    event_parts = np.full((*tokens.shape, len(PARTS)), -1)
    for line, items in enumerate(talks):
        for number, talk in enumerate(items):
            (mine,) = np.nonzero(packed.segments[line].numpy() == number)
            if talk.family == "drill":
                continue
            answer = [place for place in mine.tolist() if labels[line, place] != IGNORE]
            named = -1
            for place in mine.tolist():
                if tokens[line, place] in _TIMES:
                    named = tokens[line, place]
                if place == answer[0] or labels[line, place] in _FOUND_BY_TIME:
                    last[line, place] = named
            if talk.family in ASKING:
                for place, event in zip(answer, clauses(talk.question), strict=False):
                    event_parts[line, place] = event
    return {"last": torch.from_numpy(last), "asked": torch.from_numpy(event_parts)}


def clauses(question: str) -> list[list[int]]:
    """Returns the :data:`PARTS` of the events that a question names, in the order of the answer.

    The event after "that" comes before the one preceding it.
    """
    words = question.split()[:-1]
    starts = [
        place + 1
        for place, word in enumerate(words[:-1])
        if word == "the" and words[place + 1] in COLOUR_NAMES
    ]
    ends = [*(start - 2 for start in starts[1:]), len(words)]
    events = []
    for start, end in zip(starts, ends, strict=True):
        colour, thing, *rest_words = words[start:end]
        act = rest_words[1] if rest_words[0] == "is" else rest_words[0]
        outcome = TOKEN_ID[rest_words[-1]] if act in ("turns", "changes") else -1
        events.append([TOKEN_ID[colour], TOKEN_ID[thing], TOKEN_ID[act], outcome])
    return events[::-1]
