"""The three clip benchmarks: their questions, and the metrics of each answer.

Each benchmark has one question per clip, and no two benchmarks share clips.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from os import replace
from pathlib import Path
from typing import Any

import av
from av.video.stream import VideoStream

from espalier.harness.errors import UserError
from espalier.harness.media import frames
from espalier.harness.seedling.scene_benchmarks import (
    exact_match,
    iou,
    is_one_of,
    reading_score,
    words,
)
from espalier.harness.seedling.scenes import BOX, COLOUR_NAMES, SHAPES
from espalier.harness.seedling.video.clips import DrawnClip, clip, tell
from espalier.harness.seedling.video.dialogues import MAKERS, dialogue_stream
from espalier.harness.seedling.video.events import PLACES, Event, sentence
from espalier.harness.seedling.vocabulary import box_from_bins, locations

RATE = 1
"""Frames per second: the time word of a frame is its second."""


def in_memory(clip: DrawnClip) -> frames.Clip:
    """Return the frames as a sampled video, without a file."""
    length = len(clip.frames)
    return frames.Clip(
        frames=clip.frames,
        indices=tuple(range(length)),
        timestamps=tuple(frame / RATE for frame in range(length)),
        fps=float(RATE),
        total_frames=length,
        duration=length / RATE,
    )


def write_mp4(clip: DrawnClip, folder: str | Path) -> Path:
    """Write a clip as an mp4 file and return its path.

    Lossless H.264 in RGB (libx264rgb at a quantiser of 0), so that reading gives the same pixels. The
    file is replaced atomically.

    Args:
        clip: The clip.
        folder: Folder of the file; created if missing.

    Raises:
        UserError: This build of FFmpeg lacks the codec.
    """
    if "libx264rgb" not in av.codecs_available:
        raise UserError(
            "clips cannot be written as mp4 files: this build of PyAV lacks libx264rgb; valid: frames in memory"
        )
    path = Path(folder) / f"{clip.split}_{clip.seed}_{clip.index}_{len(clip.frames)}.mp4"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    height, width = clip.frames.shape[1:3]
    with av.open(str(part), "w", format="mp4") as container:
        stream = container.add_stream("libx264rgb", rate=Fraction(RATE))
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = width, height, "rgb24"
        stream.options = {"qp": "0", "preset": "ultrafast", "threads": "1"}
        for pixels in clip.frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    replace(part, path)
    return path


NEAR = 1
"""Tolerance of a moment, in frames."""
LEAST_IOU = 0.5

DIGITS = tuple(str(value) for value in range(10))
"""Words for digits."""

_TIME = re.compile(r"\bt(\d{1,4})\b")
_THING = rf"(?:{'|'.join(COLOUR_NAMES)}) (?:frame|{'|'.join(SHAPES)})"
_PLACE = "|".join(PLACES)
_AT = rf"the {_THING} at the (?:{_PLACE})"
_NEW = rf"a {_THING}(?: with digit \d)?"
_TOLD = re.compile(
    rf"(?:there is {_NEW} at the (?:{_PLACE})"
    rf"|{_NEW} enters at the (?:{_PLACE})"
    rf"|the {_THING} leaves from the (?:{_PLACE})"
    rf"|the {_THING} moves from the (?:{_PLACE}) to the (?:{_PLACE})"
    rf"|{_AT} turns (?:{'|'.join(COLOUR_NAMES)})"
    rf"|{_AT} is covered"
    rf"|{_AT} is seen again"
    rf"|{_AT} changes from digit \d to digit \d)"
)


def digits_score(answer: str, truth: str) -> float:
    """Return the share of digits read, in order (1-NED), without the times before them."""
    return reading_score(*(" ".join(_untimed(text)) for text in (answer, truth)))


def only_digits(answer: str) -> bool:
    """Return whether an answer consists of digits and times, with at least one digit."""
    tokens = _untimed(answer)
    return bool(tokens) and all(word in DIGITS for word in tokens)


def conclusion(family: str, answer: str) -> str:
    """Return the conclusion of an answer: the number after the objects, the order or the event after the times.

    Args:
        family: Family of the question.
        answer: Any text. The number is its last word; answers of other families are returned unchanged.
    """
    if family == "how_many":
        return " ".join(words(answer)[-1:])
    return " ".join(_untimed(answer)) if family == "order" else answer


def _untimed(answer: str) -> list[str]:
    return [word for word in words(answer) if not _TIME.fullmatch(word)]


def caption_sentences(answer: str) -> list[tuple[int, str]]:
    """Return the sentences of a caption that describe an event: frame, and words after the time."""
    sentences = []
    for part in answer.split(";"):
        time = re.fullmatch(r"at time t(\d{1,4}) (.*)", " ".join(part.split()))
        if time and _TOLD.fullmatch(time[2]):
            sentences.append((int(time[1]), time[2]))
    return sentences


def caption_score(answer: str, events: Sequence[Event]) -> dict[str, float]:
    """Return the scores of a caption, compared with the events of its clip, all in 0..1.

    An event is correct if a sentence has its kind, object, digits and places, and a time within one
    frame; exact is the share of events with their exact frame. The match of sentences and events is
    the largest that is one to one and in order. Cost: sentences times events.
    """
    sentences = caption_sentences(answer)
    truth = [caption_sentences(sentence(event))[0] for event in events]
    right, total = match_count(sentences, truth, NEAR), max(len(truth), 1)
    return {
        "events_right": right / total,
        "events_precision": right / max(len(sentences), 1),
        "events_exact": match_count(sentences, truth, 0) / total,
        "words": float(len(answer.split())),
        "unparsed": float(not sentences),
    }


def match_count(
    sentences: Sequence[tuple[int, str]], truth: Sequence[tuple[int, str]], tolerance: int
) -> int:
    """Return the length of the longest common subsequence, with times equal within `tolerance` frames."""
    best = [0] * (len(truth) + 1)
    for frame, text in sentences:
        row = [0]
        for place, (true_frame, true_text) in enumerate(truth):
            equal = text == true_text and abs(frame - true_frame) <= tolerance
            row.append(max(row[-1], best[place + 1], best[place] + equal))
        best = row
    return best[-1]


def moment(answer: str) -> int | None:
    """Return the frame in an answer; None unless it names exactly one time."""
    times = _TIME.findall(answer)
    return int(times[0]) if len(times) == 1 else None


def moment_score(answer: str, frame: int, box: BOX) -> dict[str, float]:
    """Return the scores of an answer to a question for the moment and box of an event.

    The moment must be within one frame; "found" requires an IoU of at least 0.5 too. An answer that names one time and
    has four location tokens is parsed.
    """
    frame_named, bins = moment(answer), locations(answer)
    near = frame_named is not None and abs(frame_named - frame) <= NEAR
    overlap = iou(box_from_bins(bins), box) if len(bins) == 4 else 0.0
    return {
        "found": float(near and overlap >= LEAST_IOU),
        "moment_near": float(near),
        "mean_iou": overlap,
        "unparsed": float(frame_named is None or len(bins) != 4),
    }


FAMILY_CYCLES: dict[str, tuple[str, ...]] = {
    "seedling_video_caption": ("caption",),
    "seedling_video_qa": ("what", "where", "how_many", "order", "when", "digits"),
    "seedling_video_find": ("find",),
}
"""Question families of a benchmark, used cyclically over its clips."""


def samples(
    name: str, split: str, seed: int, first: int, count: int, frames: int
) -> list[dict[str, Any]]:
    """Return the samples of a benchmark, without pixels.

    Args:
        name: A key of :data:`FAMILY_CYCLES`.
        split: "val" or "test".
        seed: Seed of the clips.
        first: Index of the first clip.
        count: Number of samples, one clip each.
        frames: Frames of each clip.
    """
    cycle = FAMILY_CYCLES[name]
    records = []
    for number in range(count):
        address = {"split": split, "seed": seed, "index": first + number, "frames": frames}
        story = tell(split, seed, first + number, frames)
        dialogue = MAKERS[cycle[number % len(cycle)]](story, dialogue_stream(story))
        records.append(
            address
            | {
                "family": dialogue.family,
                "template": dialogue.template,
                "question": dialogue.question,
                "answer": dialogue.answer,
                "moment": dialogue.target.frame if dialogue.target else -1,
                "box": list(dialogue.target.box) if dialogue.target else [],
            }
        )
    return records


def sample_clip(sample: dict[str, Any]) -> DrawnClip:
    """Return the drawn clip of a sample."""
    return clip(sample["split"], sample["seed"], sample["index"], sample["frames"])


def caption_metrics(sample: dict[str, Any], answer: str) -> dict[str, float]:
    """Return the metrics of a caption, compared with the events of its clip; "words" is its length."""
    story = tell(sample["split"], sample["seed"], sample["index"], sample["frames"])
    return caption_score(answer, story.events)


def qa_metrics(sample: dict[str, Any], answer: str) -> dict[str, float]:
    """Return the metrics of a short answer, by family, and except for reading also over all families.

    Counts and orders are scored by their conclusion, without the objects and times named before it.
    """
    family, truth = sample["family"], sample["answer"]
    if family == "digits":
        return {
            "one_minus_ned": digits_score(answer, truth),
            "unparsed": float(not only_digits(answer)),
        }
    answer, truth = conclusion(family, answer), conclusion(family, truth)
    right = exact_match(answer, truth)
    scores = {"accuracy": right, f"accuracy_{family}": right, "unparsed": float(not words(answer))}
    if family == "when":
        answered, expected = moment(answer), moment(truth)
        near = answered is not None and expected is not None and abs(answered - expected) <= NEAR
        scores |= {"near_when": float(near), "unparsed": float(answered is None)}
    elif family == "how_many":
        scores["unparsed"] = float(not is_one_of(answer, DIGITS))
    return scores


def find_metrics(sample: dict[str, Any], answer: str) -> dict[str, float]:
    """Return the metrics of a moment and a box."""
    return moment_score(answer, sample["moment"], tuple(sample["box"]))
