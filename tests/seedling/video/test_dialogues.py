from __future__ import annotations

from statistics import mean

import pytest

from espalier.harness.seedling.scenes import COLOUR_NAMES
from espalier.harness.seedling.video.clip_benchmarks import conclusion
from espalier.harness.seedling.video.clips import tell
from espalier.harness.seedling.video.dialogues import FAMILIES, dialogue_stream, dialogues
from espalier.harness.seedling.video.events import (
    KINDS,
    PLACES,
    TOKEN_ID,
    WORDS,
    Story,
    caption,
    clause,
    encode,
    time_word,
)
from espalier.harness.seedling.vocabulary import UNK, VOCABULARY, box_text

EACH = {family: 3 for family in FAMILIES}


@pytest.fixture(scope="module")
def stories() -> list[Story]:
    return [tell("test", 0, index, 32) for index in range(150)]


def test_words_start_with_those_of_the_picture_model():
    assert WORDS[: len(VOCABULARY)] == VOCABULARY
    assert len(set(WORDS)) == len(WORDS) == len(TOKEN_ID) == 256


def test_every_word_is_known_and_every_family_asked(stories):
    templates = set()
    for story in stories:
        for dialogue in dialogues(story, dialogue_stream(story), EACH):
            templates.add(dialogue.family)
            assert UNK not in encode(f"{dialogue.question} {dialogue.answer}"), dialogue
    assert templates == set(FAMILIES)


def test_captions_are_long_and_hold_all_kinds(stories):
    lengths = [len(caption(story.events).split()) for story in stories]
    assert mean(lengths) >= 300
    assert max(lengths) < 512
    assert {event.kind for story in stories for event in story.events} == set(KINDS)


def frames_of(story: Story, text: str) -> list[int]:
    return [e.frame for e in story.events if e.kind != "present" and clause(e) == text]


def there(story: Story, frame: int) -> list:
    """Return the tracks that are seen in a frame."""
    return [
        track for track in story.tracks if track.colour[frame] >= 0 and not track.covered[frame]
    ]


def answers_by_search(story: Story, text: str) -> set[str]:
    """Answer a question from tracks and events alone, by trying all of them."""
    words = text.split()
    frame = int(words[-2][1:]) if words[-2][0] == "t" and words[-2][1:].isdigit() else -1
    if text.startswith("what is the time when "):
        return {f"t{at}" for at in frames_of(story, text[len("what is the time when ") : -2])}
    if text.startswith("what happens next after "):
        return {
            clause(after)
            for before, after in zip(story.events, story.events[1:], strict=False)
            if before.kind != "present"
            and clause(before) == text[len("what happens next after ") : -2]
        }
    if text.startswith("is it before or after "):
        reference, event_text = text[len("is it before or after ") : -2].split(" that ")
        return {
            "before" if a < b else "after"
            for a in frames_of(story, event_text)
            for b in frames_of(story, reference)
        }
    if text.startswith("what digit"):
        return {
            str(track.digit[frame])
            for track in there(story, frame)
            if track.name(frame) == f"{words[5]} frame"
        }
    if "turns to what colour" in text:
        return {
            COLOUR_NAMES[track.colour[frame]]
            for track in story.tracks
            if track.present(frame - 1) and track.name(frame - 1) == f"{words[1]} {words[2]}"
        }
    if text.startswith("what is at the "):
        return {
            track.name(frame)
            for track in there(story, frame)
            if track.place[frame] == PLACES.index(f"{words[4]} {words[5]}")
        }
    if text.startswith("what "):
        acts = text[len("what ") : text.index(" at time")]
        return {
            f"{e.colour} {e.thing}"
            for e in story.events
            if e.frame == frame and e.kind != "present" and clause(e).endswith(f" {acts}")
        }
    if text.startswith("where is the"):
        return {
            PLACES[track.place[frame]]
            for track in there(story, frame)
            if track.name(frame) == f"{words[3]} {words[4]}"
        }
    if text.startswith("how many "):
        things = [track.thing == "frame" for track in there(story, frame)]
        return {
            str({"digits": sum(things), "objects": len(things)}.get(words[2], things.count(False)))
        }
    if text.startswith("find when and where "):
        wanted = text[len("find when and where ") : -2]
        return {
            f"t{e.frame} {box_text(e.box)}"
            for e in story.events
            if e.kind != "present" and clause(e) == wanted
        }
    raise AssertionError(text)


def test_answers_are_right_and_unique(stories):
    for story in stories:
        for dialogue in dialogues(story, dialogue_stream(story), EACH):
            if dialogue.family not in ("caption", "digits"):
                answers = conclusion(dialogue.family, dialogue.answer)
                assert answers_by_search(story, dialogue.question) == {answers}, dialogue


def test_counts_and_orders_say_first_what_they_follow_from(stories):
    templates = set()
    for story in stories:
        for dialogue in dialogues(story, dialogue_stream(story), {"how_many": 3, "order": 6}):
            templates.add(dialogue.template)
            words, question = dialogue.answer.split(), dialogue.question
            if dialogue.family == "how_many":
                frame = int(question.split()[-2][1:])
                boxes = {t.name(frame): t.box[frame] for t in there(story, frame)}
                remaining, count = " ".join(words[:-1]), 0
                for number, place in enumerate(PLACES):
                    assert remaining.startswith(f"{place} "), "every place, row by row"
                    remaining = remaining.removeprefix(f"{place} ")
                    thing = "no" if remaining.startswith("no") else " ".join(remaining.split()[:2])
                    remaining = remaining.removeprefix(thing).lstrip()
                    inside = [
                        name
                        for name, (x1, y1, x2, y2) in boxes.items()
                        if ((y1 + y2) // 2 // 32, (x1 + x2) // 2 // 32) == divmod(number, 3)
                        and dialogue.template
                        in ("objects", "digits" if name.endswith("frame") else "shapes")
                    ]
                    assert inside == ([] if thing == "no" else [thing])
                    count += thing != "no"
                assert (remaining, count) == ("", int(words[-1]))
                continue
            event_text, second = (int(word[1:]) for word in words[:2])
            if dialogue.template == "before_after":
                reference, clause_asked = question[len("is it before or after ") : -2].split(
                    " that "
                )
                assert (frames_of(story, clause_asked), frames_of(story, reference)) == (
                    [event_text],
                    [second],
                )
                assert words[2:] == ["before" if event_text < second else "after"]
            else:
                assert frames_of(story, question[len("what happens next after ") : -2]) == [
                    event_text
                ]
                assert second in frames_of(story, " ".join(words[2:]))
                assert not [e for e in story.events if event_text < e.frame < second]
    assert templates == {"digits", "shapes", "objects", "before_after", "next"}


def test_digits_are_read_in_the_order_in_which_they_are_shown(stories):
    for story in stories[:40]:
        expected: list[str] = []
        states = {}
        for frame in range(story.length):
            # Objects of the first frame are numbered in reading order; later, one new digit a frame.
            for number, track in enumerate(story.tracks):
                if track.digit[frame] >= 0 and states.get(number) != track.digit[frame]:
                    states[number] = track.digit[frame]
                    expected += [time_word(frame), str(track.digit[frame])]
        (dialogue,) = dialogues(story, dialogue_stream(story), {"digits": 1})
        assert dialogue.answer.split() == expected


def test_before_and_after_are_said_alike(stories):
    answers = [
        conclusion(dialogue.family, dialogue.answer)
        for story in stories
        for dialogue in dialogues(story, dialogue_stream(story), {"order": 6})
        if dialogue.template == "before_after"
    ]
    assert 0.4 < answers.count("before") / len(answers) < 0.6


@pytest.mark.parametrize(("frames", "count"), [(8, 300), (32, 100), (112, 12)])
def test_clips_of_every_length_are_asked_about(frames, count):
    """The shortest have few events to ask about, the longest need the most draws."""
    for index in range(count):
        story = tell("train", 5, index, frames)
        for dialogue in dialogues(story, dialogue_stream(story)):
            assert UNK not in encode(f"{dialogue.question} {dialogue.answer}"), dialogue
            if dialogue.family not in ("caption", "digits"):
                answers = conclusion(dialogue.family, dialogue.answer)
                assert answers_by_search(story, dialogue.question) == {answers}, dialogue
