from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest

from espalier.harness.seedling.scenes import COLOUR_NAMES
from espalier.harness.seedling.video.clips import (
    LEAST_OBJECTS,
    MOST_OBJECTS,
    REST,
    DrawnClip,
    clip,
    tell,
)
from espalier.harness.seedling.video.dialogues import dialogue_stream, dialogues
from espalier.harness.seedling.video.events import PLACES
from tests.seedling.test_scenes import SPLITS


@pytest.fixture(scope="module")
def clips() -> list[DrawnClip]:
    return [clip(split, 0, index) for split in SPLITS for index in range(12)]


def test_pixels_and_questions_are_pinned(clips):
    """A change here changes every benchmark: bump the tasks' version and retrain."""
    digest = hashlib.sha256()
    for drawn in clips:
        digest.update(drawn.frames.tobytes())
        for dialogue in dialogues(drawn, dialogue_stream(drawn)):
            digest.update(f"{dialogue.template}|{dialogue.question}|{dialogue.answer}\n".encode())
    assert digest.hexdigest()[:16] == "449cc37824ec7cd9"


def test_a_clip_is_a_function_of_its_address():
    repeated = [clip("val", 0, 3) for _ in range(2)]
    assert np.array_equal(repeated[0].frames, repeated[1].frames)
    different = [clip("val", 1, 3), clip("val", 0, 4), clip("test", 0, 3)]
    assert len({drawn.frames.tobytes() for drawn in (repeated[0], *different)}) == 4


@pytest.mark.parametrize("frames", [8, 112])
def test_other_lengths(frames):
    drawn = clip("val", 0, 0, frames)
    assert (drawn.frames.shape, drawn.patches.shape) == ((frames, 96, 96, 3), (frames, 144))
    assert all(event.frame < frames - 1 for event in drawn.events)


@pytest.mark.parametrize("frames", [7, 113])
def test_lengths_without_words_are_refused(frames):
    with pytest.raises(ValueError, match=f"frames={frames}; valid: 8 to 112"):
        clip("val", 0, 0, frames)


def boxes(drawn: DrawnClip, frame: int) -> dict[int, tuple[int, ...]]:
    return {
        number: tuple(track.box[frame].tolist())
        for number, track in enumerate(drawn.tracks)
        if track.present(frame)
    }


def test_objects_never_touch_and_differ_in_colour(clips):
    for drawn in clips:
        for frame in range(drawn.length):
            current = boxes(drawn, frame)
            assert LEAST_OBJECTS <= len(current) <= MOST_OBJECTS
            taken = np.zeros((96, 96), int)
            for x0, y0, x1, y1 in current.values():
                assert 0 <= x0 < x1 <= 96
                assert 0 <= y0 < y1 <= 96
                taken[y0:y1, x0:x1] += 1
            assert taken.max() == 1
            colours = [int(drawn.tracks[number].colour[frame]) for number in current]
            assert len(set(colours)) == len(colours)


def changes(drawn: DrawnClip) -> list[tuple[int, int, str]]:
    """Return (frame, track, kind) of what differs between neighbouring frames, from the tracks alone."""
    current = []
    for number, track in enumerate(drawn.tracks):
        for frame in range(1, drawn.length):
            was, now = track.present(frame - 1), track.present(frame)
            if was != now:
                current.append((frame, number, "enter" if now else "leave"))
            if not (was and now):
                continue
            if track.colour[frame] != track.colour[frame - 1]:
                current.append((frame, number, "turn"))
            if track.digit[frame] != track.digit[frame - 1]:
                current.append((frame, number, "change"))
            if track.covered[frame] != track.covered[frame - 1]:
                current.append((frame, number, "cover" if track.covered[frame] else "uncover"))
            if track.place[frame] < 0 <= track.place[frame - 1]:
                current.append((frame, number, "move"))
    return sorted(current)


def test_the_events_are_what_differs_between_frames(clips):
    for drawn in clips:
        noted = [(e.frame, e.track, e.kind) for e in drawn.events if e.kind != "present"]
        assert noted == changes(drawn)
        frames = [frame for frame, _, _ in noted]
        assert len(set(frames)) == len(frames), "two events at once"


def test_what_an_event_says_is_what_the_tracks_show(clips):
    for drawn in clips:
        for event in drawn.events:
            track, frame = drawn.tracks[event.track], event.frame
            before = frame if event.kind in ("present", "enter") else frame - 1
            assert (event.colour, event.thing) == (
                COLOUR_NAMES[track.colour[before]],
                track.thing,
            )
            assert event.place == PLACES[track.place[before]]
            assert event.box == tuple(track.box[before].tolist())
            assert event.digit == ("" if track.thing != "frame" else str(track.digit[before]))
            x0, y0, x1, y1 = event.box
            row, column = (y0 + y1) // 64, (x0 + x1) // 64
            assert PLACES[3 * row + column] == event.place
            if event.kind == "turn":
                assert event.outcome == COLOUR_NAMES[track.colour[frame]]
            elif event.kind == "change":
                assert event.outcome == str(track.digit[frame])
            elif event.kind == "move":
                arrived = track.place[frame:]
                assert event.outcome == PLACES[arrived[arrived >= 0][0]]
            else:
                assert event.outcome == ""


def test_each_state_lasts_some_frames(clips):
    for drawn in clips:
        for number in range(len(drawn.tracks)):
            times = [event.frame for event in drawn.events if event.track == number]
            assert all(b - a >= REST for a, b in pairwise(times))


def test_only_objects_and_light_change(clips):
    """Pixels of an object at rest are the same from frame to frame, those of its neighbourhood nearly."""
    for drawn in clips[:6]:
        for number, track in enumerate(drawn.tracks):
            for frame in range(1, drawn.length):
                due = [e for e in drawn.events if e.track == number and e.frame == frame]
                if due or not (track.present(frame - 1) and track.present(frame)):
                    continue
                if track.place[frame] < 0 or track.place[frame - 1] < 0 or track.thing != "frame":
                    continue
                x0, y0, x1, y1 = track.box[frame]
                pair = drawn.frames[frame - 1 : frame + 1, y0:y1, x0:x1]
                assert np.array_equal(pair[0], pair[1])


def patches_by_pixels(drawn: DrawnClip, frame: int) -> np.ndarray:
    """Return the owner of each patch by counting pixels one by one."""
    owner = np.full(144, -1)
    for patch in range(144):
        top, left = 8 * (patch // 12), 8 * (patch % 12)
        counts = {
            number: sum(
                x0 <= x < x1 and y0 <= y < y1
                for y in range(top, top + 8)
                for x in range(left, left + 8)
            )
            for number, (x0, y0, x1, y1) in boxes(drawn, frame).items()
        }
        best = max(counts, key=lambda number: counts[number])
        owner[patch] = best if counts[best] >= 12 else -1
    return owner


def test_patches_are_those_of_the_boxes(clips):
    for drawn in clips[::9]:
        for frame in (0, 15, 31):
            assert np.array_equal(drawn.patches[frame], patches_by_pixels(drawn, frame))


def test_digit_images_stay_in_their_split(clips):
    """A clip of one split told as another's shows other digits in the same frames."""
    assert tell("train", 0, 0, 32).events == tell("train", 0, 0, 32).events
    pictures: dict[str, set[bytes]] = {split: set() for split in SPLITS}
    for drawn in clips:
        for track in drawn.tracks:
            for frame in np.flatnonzero((track.digit >= 0) & ~track.covered).tolist():
                x0, y0, x1, y1 = track.box[frame]
                grey = drawn.frames[frame, y0 + 3 : y1 - 3, x0 + 3 : x1 - 3, 0]
                # Lines have a grey of their own in each track; which image it is shows in the rest.
                scaled = (grey.astype(int) - 16) * 255 // max(int(grey.max()) - 16, 1)
                pictures[drawn.split].add((scaled // 8).astype(np.uint8).tobytes())
    assert not pictures["train"] & pictures["test"]
    assert not pictures["val"] & pictures["test"]
