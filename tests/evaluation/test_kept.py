"""What the journal keeps of a sample: plain values, the question as it went out, references to media."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from espalier.harness.evaluation.evaluate import evaluate_session
from espalier.harness.evaluation.journal_scores import read_scorings
from espalier.harness.evaluation.samples import (
    ENTRIES,
    TEXT,
    finished_samples,
    journal_media,
    journal_question,
    json_value,
    score_entries,
)
from espalier.harness.seedling.video.clip_benchmarks import in_memory
from espalier.harness.seedling.video.clips import clip
from espalier.harness.store import Journal
from espalier.harness.store.answer_digest import journal_answers
from tests.arithmetic import Calculator, make_spec, sums, write_task


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (("yes", 1, None, True), ["yes", 1, None, True]),
        ({"a": np.float32(0.5), 2: np.int64(3)}, {"a": 0.5, "2": 3}),
        (float("nan"), "nan"),
        (np.arange(3), [0, 1, 2]),
        ({"b", "a"}, ["a", "b"]),
        (Image.new("RGB", (1, 1)), "<Image>"),
        (b"\x00", "<bytes>"),
        ("x" * (TEXT + 1), "x" * TEXT + f"… ({TEXT + 1} characters)"),
        ([0] * (ENTRIES + 5), [0] * ENTRIES),
    ],
)
def test_any_value_becomes_plain_and_bounded(value: Any, kept: Any) -> None:
    assert json_value(value) == kept
    json.dumps(json_value(value), allow_nan=False)


def test_the_question_is_the_chat_with_a_mark_for_each_picture(tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"1234")
    red, blue = (Image.new("RGB", (4, 2), colour) for colour in ("red", "blue"))
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "Be short."}]},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": red},
                {"type": "text", "text": "What?"},
                {"type": "image", "image": blue},
                {"type": "video", "video": str(clip)},
            ],
        },
    ]
    assert journal_question(chat) == "[system] Be short.\n<image>What?<image><video>"
    first, second, third = journal_media(chat, "data/set/test/7")
    assert (first["from"], first["kind"], first["size"]) == ("data/set/test/7#0", "image", [4, 2])
    assert len(first["sha256"]) == 16
    assert first["sha256"] != second["sha256"]
    assert third == {"from": "data/set/test/7#2", "kind": "video", "path": str(clip), "bytes": 4}


def test_frames_in_memory_are_told_by_their_shape_and_a_hash() -> None:
    clips = [in_memory(clip("val", 0, index, 8)) for index in (0, 1)]
    media = [
        journal_media([{"role": "user", "content": [{"type": "video", "video": video}]}], "s")
        for video in clips
    ]
    assert [entry["shape"] for (entry,) in media] == [[8, 96, 96, 3]] * 2
    assert media[0][0]["sha256"] != media[1][0]["sha256"]


def test_a_run_keeps_question_target_and_media(tmp_path: Path, journal: Journal) -> None:
    spec = make_spec(write_task(tmp_path / "t", sums(3, wrong=[1])), metrics=("right", "f1"))
    evaluate_session(spec, Calculator(), journal)
    context = journal.entries()[1]["asked"]
    assert (context["question"], context["target"]) == ("<image>1+7", "no")
    (picture,) = context["media"]
    assert (picture["from"], picture["size"]) == ("json/test/1#0", [4, 4])
    # Journals of earlier versions have none of it, and their samples are finished all the same.
    old = [
        {k: v for k, v in entry.items() if k not in ("asked", "values", "units", "own")}
        for entry in journal.entries()
    ]
    assert {key: sample.context for key, sample in finished_samples(old).items()} == {
        ("sums", i): None for i in range(3)
    }
    assert json.loads(json.dumps(finished_samples(old)["sums", 0].entry())) == old[0]
    assert read_scorings(old)["sums", 1].scores == {"right": 0.0}
    # A run that was taken over may have answered a sample twice.
    twice = [*old, {**old[0], "answer": "of another machine"}]
    first = {key: sample.answer for key, sample in finished_samples(old).items()}
    assert {key: sample.answer for key, sample in finished_samples(twice).items()} == first
    assert journal_answers(twice) == journal_answers(old) == first


def test_a_table_that_several_metrics_share_is_written_once() -> None:
    table = {"score": 1.0, "prediction": "yes"}
    values = {("t", 0): {"f1": table, "precision": dict(table), "other": "yes"}}
    (entry,) = score_entries({("t", 0): {"f1": 0.9}}, values=values)
    assert entry["values"] == [
        {"of": ["f1", "precision"], "value": table},
        {"of": ["other"], "value": "yes"},
    ]
    assert read_scorings([entry])["t", 0].values == values["t", 0]


def test_damaged_scorings_are_named_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    good = {"task": "damaged", "doc_id": 0, "scores": {"f1": 0.9}, "units": {"f1": 0}}
    bad = [
        {**good, "doc_id": 1, "units": {"f1": "first"}},
        {**good, "doc_id": 2, "values": [{"of": "f1"}]},
        {**good, "doc_id": 3, "own": {"f1": "right"}},
    ]
    assert list(read_scorings([good, *bad])) == [("damaged", 0)]
    assert capsys.readouterr().err.count("is damaged and left out") == 3
