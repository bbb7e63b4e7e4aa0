"""Information that words of answers need before their attention looks it up."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from espalier.harness.seedling.scenes import COLOUR_NAMES
from espalier.harness.seedling.video.clips import clip
from espalier.harness.seedling.video.dialogues import FAMILIES, named_once
from espalier.harness.seedling.video.events import TOKEN_ID, WORDS, clause
from lab.training.clip_features import labelled, show
from lab.training.dialogue_packs import IGNORE
from lab.training.naming_losses import Namers
from lab.training.video_drills import talks_about
from lab.training.video_labels import PARTS, asked_for, clauses
from lab.training.video_model import build_video_model
from lab.training.video_packs import Read, pack_talks

LATER = 3
ASKED = {**dict.fromkeys(FAMILIES, 3), "caption": 1, "digits": 1, "goes_on": 4}
WEIGHTS = dict.fromkeys([*FAMILIES, "drill", "end"], 1.0)


@pytest.fixture(scope="module")
def lesson():
    """Dialogues about two clips shown three frames later, and the same packed."""
    clips = [labelled(clip("train", 0, number, 32)) for number in (5, 6)]
    shown = show(clips, 20, 0.0, np.random.default_rng(0), LATER)
    talks = [talks_about(one.clip, 1, ASKED, 1) for one in clips]
    return talks, pack_talks(talks, WEIGHTS, shown)


def parts_of(event) -> list[int]:
    outcome = event.outcome if event.kind in ("turn", "change") else None
    words = clause(event).split()
    (act,) = {"enters", "leaves", "moves", "turns", "covered", "seen", "changes"} & set(words)
    said = [TOKEN_ID[word] for word in (event.colour, event.thing, act)]
    return [*said, TOKEN_ID[outcome] if outcome else -1]


def test_the_parts_of_a_question_are_those_of_its_events():
    kinds = set()
    for number in range(12):
        drawn = clip("train", 0, number, 32)
        events = named_once(drawn)
        for event, other in pairwise(events):
            told = clause(event)
            both = f"is it before or after {clause(other)} that {told} ?"
            assert clauses(both) == [parts_of(event), parts_of(other)]
            assert clauses(f"what is the time when {told} ?") == [parts_of(event)]
            assert clauses(f"what happens next after {told} ?") == [parts_of(event)]
            assert clauses(f"find when and where {told} .") == [parts_of(event)]
            kinds.add(event.kind)
    assert len(kinds) == 7


def test_a_word_is_to_know_the_time_named_last_and_what_is_asked(lesson):
    """Every word that is found by a time, and the first of every answer; no other word."""
    talks, packed = lesson
    found = asked_for(talks, packed)
    times = {word for word in WORDS if word[0] == "t" and word[1:].isdigit()}
    looked_up = {*times, "no", *map(str, range(10)), *COLOUR_NAMES}
    rows = {"last": 0, "asked": 0}
    for line, items in enumerate(talks):
        for number, talk in enumerate(items):
            (places,) = np.nonzero(packed.segments[line].numpy() == number)
            named, begun = None, False
            for place in places:
                word = WORDS[packed.tokens[line, place]]
                named = word if word in times else named
                label = int(packed.labels[line, place])
                coming = WORDS[label] if label != IGNORE else None
                last = int(found["last"][line, place])
                parts = found["asked"][line, place].tolist()
                if talk.family == "drill" or coming is None:
                    assert (last, max(parts)) == (-1, -1)
                elif named and (coming in looked_up or not begun):
                    assert WORDS[last] == named
                else:
                    assert last == -1
                begun |= coming is not None
                rows["last"] += last >= 0
                rows["asked"] += max(parts) >= 0
                if max(parts) >= 0:
                    assert talk.family in ("when", "order", "find")
                    assert coming in times
    assert rows["last"] > 100
    assert rows["asked"] >= 2 * 9


def test_a_word_that_holds_what_it_looks_for_names_it_and_no_other(lesson):
    talks, packed = lesson
    wanted = asked_for(talks, packed)
    torch.manual_seed(0)
    model, namers = build_video_model("seedling_video_draft"), Namers()
    words = model.model.language_model.embed_tokens.weight.detach()
    labels = torch.full((2, 4), -1)
    tokens = {name: labels for name in ("kind", "colour", "act", "owner", "was_kind", "was_colour")}
    tokens |= {"frame": torch.zeros_like(labels)} | wanted

    def losses(last: torch.Tensor, parts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of rows that hold these words behind the first layer, each in the directions of its own matrix."""
        held = words[last.clamp(min=0)] @ namers.get_parameter("last").T
        for slot, part in enumerate(PARTS):
            mine = parts[..., slot, None]
            held = (
                held + (mine >= 0) * words[mine[..., 0].clamp(min=0)] @ namers.get_parameter(part).T
            )
        visual = torch.zeros(2, 4, held.shape[-1])
        layer = torch.cat([visual, held.detach()], dim=1)
        positions, segments = torch.zeros(layer.shape[:2]), torch.zeros(held.shape[:2])
        read = Read(held, {0: layer, 1: layer}, positions, segments, slice(0, 4))
        found = namers.losses(model, read, {"time": 0, "act": 0, "last": 1, "asked": 1}, tokens)
        return {name: found[name] for name in ("last", "asked")}

    with torch.no_grad():
        namers.asked_gain.fill_(8.0)
        right = losses(wanted["last"], wanted["asked"])
        wrong = losses(wanted["last"].roll(1, 0).roll(5, 1), wanted["asked"].roll(1, -1))
    for name in right:
        assert right[name] < 0.5, name
        assert wrong[name] > 4, name
