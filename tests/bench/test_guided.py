"""What a draft is shown of a clip, and which of its words it gets right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from espalier.harness.seedling.video.events import encode
from lab.bench.clip_subsets import SeenClip, clip_subsets
from lab.bench.guided_page import DRAWN, page, write_page
from lab.bench.guided_words import CaptionRecord, kind_of_word, summarised

FRAMES, PLACES = 8, 6


def clip() -> SeenClip:
    """A clip whose third frame alone differs from the one before it, with an object in place 1 of all frames."""
    features = torch.zeros(FRAMES, PLACES, 4)
    features[:2, :, 0] = features[2:, :, 1] = 1.0
    objects = torch.zeros(FRAMES, PLACES, dtype=torch.bool)
    objects[:, 1] = True
    begins = torch.zeros_like(objects)
    begins[4, 1] = True
    scores = {"last first": torch.arange(float(FRAMES * PLACES))}
    tokens, shown, begun = (signal.flatten(0, 1) for signal in (features, objects, begins))
    return SeenClip(FRAMES, tokens, scores, shown, begun)


def subset(name: str, keep: int) -> list[int]:
    indices = clip_subsets(clip(), keep, torch.Generator().manual_seed(0))[name]
    assert (len(indices), indices.tolist()) == (keep, sorted(set(indices.tolist())))
    return indices.tolist()


def test_subsets_are_what_their_names_say() -> None:
    frame, place = (lambda token: token // PLACES), (lambda token: token % PLACES)
    assert {frame(token) for token in subset("whole frames, even in time", 2 * PLACES)} == {0, 4}
    assert len({place(token) for token in subset("the same places of all frames", 16)}) == 2
    assert {frame(token) for token in subset("what changed since the frame before", 12)} == {0, 2}
    assert {place(token) for token in subset("objects, then random", 8)} == {1}
    assert 4 * PLACES + 1 in subset("events, then objects", 1)
    assert not {1} & {place(token) for token in subset("no object, random", 40)}
    assert subset("last first", 3) == [45, 46, 47]


def test_shares_are_of_what_there_is_to_see() -> None:
    assert clip().shares(torch.arange(4 * PLACES)) == (0.5, 0)
    assert clip().shares(torch.tensor([4 * PLACES + 1])) == (0.125, 1)
    assert clip().shares(torch.arange(FRAMES * PLACES)) == (1, 1)


@pytest.mark.parametrize("keep", [3, 7, 12, 47])
def test_an_even_choice_leaves_equal_gaps(keep: int) -> None:
    kept = subset("even in time and space", keep)
    gaps = {
        (later - earlier) % 48 for earlier, later in zip(kept, [*kept[1:], kept[0]], strict=True)
    }
    assert max(gaps) - min(gaps) <= 1


def test_words_have_kinds() -> None:
    words = {
        "t14": "time",
        "red": "object",
        "frame": "object",
        "7": "digit",
        "top": "place",
        "centre": "place",
        "covered": "event",
        "the": "template",
        "time": "template",
        "<eos>": "end",
    }
    assert {word: kind_of_word(*encode(word)) for word in words} == words


def caption_records() -> list[CaptionRecord]:
    caption = encode("at time t3 the red star leaves from the top left ; <eos>")
    right, wrong = [True] * len(caption), [True, True, False, *[True] * 9, False]
    settings = [(name, 0.9, places) for name in DRAWN for places in ("original", "renumbered")]
    answers = {setting: wrong for setting in settings}
    kept = {("everything", 0.0): (1.0, 1.0)} | {(name, 0.9): (0.25, 0.5) for name in DRAWN}
    return [CaptionRecord(caption, {("everything", 0.0, "original"): right, **answers}, kept)] * 2


def test_shares_kinds_and_first_mistakes() -> None:
    summary = summarised(caption_records())
    guided = summary["random", 0.9, "original"]
    assert guided.accepted.value == pytest.approx(11 / 13)
    assert guided.by_kind == pytest.approx(
        {"time": 0, "object": 1, "place": 1, "event": 1, "end": 0, "template": 1}
    )
    assert (guided.first["time"], guided.run) == (1, 2)
    assert (guided.objects, guided.events) == (0.25, 0.5)
    whole = summary["everything", 0.0, "original"]
    assert (whole.run, sum(whole.first.values())) == (13, 0)


def test_the_page_has_a_line_for_each_subset(tmp_path: Path) -> None:
    text = page(caption_records(), 112)
    assert "predicts 100.0 [100.0, 100.0]" in text
    assert (
        "| UV-Prune | 84.6 [84.6, 84.6] | 84.6 | 2.0 | 25 % | 50 % | 0 | 100 | - | 100 | 100 | 0 | 100 |"
        in text
    )
    assert "| random | 100 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |" in text
    write_page(caption_records(), 112, tmp_path)
    assert json.loads((tmp_path / "guided.json").read_text())["clips"] == 2
    assert (tmp_path / "speculative" / "guided.png").stat().st_size > 10_000
