from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from espalier.harness.media.frames import Clip, sample_frames
from espalier.harness.models.chat_media import media_of
from espalier.harness.paths import CONF
from espalier.harness.seedling.video import clip_benchmarks as benchmarks
from espalier.harness.seedling.video.clip_benchmarks import in_memory, write_mp4
from espalier.harness.seedling.video.clips import clip
from espalier.harness.specs.run_spec import VideoSpec

FOLDERS = (Path(__file__).parents[2] / "tasks" / "seedling_video",)
METRICS = {
    "seedling_video_caption": (benchmarks.caption_metrics, "events_right", 100),
    "seedling_video_qa": (benchmarks.qa_metrics, "accuracy", 300),
    "seedling_video_find": (benchmarks.find_metrics, "found", 300),
}
WEIRD = ["", " ", "\n\n", "; ; ;", "t99999 t1", "<loc_99> <loc_-1>", "ünïcode ✓", "9" * 5000]


def data_of(name: str) -> dict:
    return json.loads((FOLDERS[0] / f"{name}.json").read_text())


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("name", METRICS)
def test_task_hands_over_frames_and_a_question(tasks, name):
    task = tasks[name]
    documents = list(task.test_docs())
    assert len(documents) == METRICS[name][2]
    document = documents[7]
    video, text = task.doc_to_messages(document)[0]["content"]
    assert (video["type"], text["text"]) == ("video", document["question"])
    assert isinstance(video["url"], Clip)
    address = (document[key] for key in ("split", "seed", "index", "frames"))
    assert np.array_equal(video["url"].frames, clip(*address).frames)
    assert task.doc_to_target(document) == document["answer"]


@pytest.mark.parametrize("name", METRICS)
def test_right_answers_score_full_marks_under_declared_names(tasks, name):
    task, reported = tasks[name], set()
    for document in list(task.test_docs())[:60]:
        scores = task.process_results(document, [document["answer"]])
        reported |= set(scores)
        headline = "one_minus_ned" if document["family"] == "digits" else METRICS[name][1]
        assert (scores[headline], scores["unparsed"]) == (1.0, 0.0)
    assert reported == set(task.aggregation()) == set(task.higher_is_better())


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("answer", WEIRD)
def test_weird_answers_never_raise_and_score_nothing(name, answer):
    metrics, headline, _ = METRICS[name]
    for sample in benchmarks.samples(**{**data_of(name), "count": 6}):
        scores = metrics(sample, answer)
        assert scores.get(headline, scores.get("one_minus_ned")) == 0.0
        if not answer.strip():
            assert scores["unparsed"] == 1.0


def test_a_time_may_be_near_without_being_right():
    sample = {"family": "when", "answer": "t12"}
    scores = benchmarks.qa_metrics(sample, "t13")
    assert (scores["accuracy"], scores["near_when"], scores["unparsed"]) == (0.0, 1.0, 0.0)
    assert benchmarks.qa_metrics(sample, "t14")["near_when"] == 0.0


@pytest.mark.slow
def test_families_are_asked_as_often_as_each_other():
    families = [sample["family"] for sample in benchmarks.samples(**data_of("seedling_video_qa"))]
    assert {families.count(family) for family in families} == {50}


def test_benchmarks_use_clips_of_their_own():
    taken: set[int] = set()
    for name in METRICS:
        clips = data_of(name)
        used = set(range(clips["first"], clips["first"] + clips["count"]))
        assert (clips["split"], clips["frames"], len(used)) == ("test", 112, METRICS[name][2])
        assert not used & taken
        taken |= used


@pytest.mark.parametrize("frames", [32, 11])
def test_a_file_holds_the_very_frames(tmp_path, frames):
    drawn = clip("test", 0, 5, frames)
    path = write_mp4(drawn, tmp_path / "new")
    assert path.suffix == ".mp4"
    assert b"ftyp" in path.read_bytes()[:16]
    read, held = sample_frames(path, frames), in_memory(drawn)
    assert np.array_equal(read.frames, held.frames)
    facts, expected = asdict(read), asdict(held)
    assert all(facts[key] == expected[key] for key in facts if key != "frames")
    assert not list(path.parent.glob("*.part"))


def test_the_task_writes_files_where_it_is_told(tasks, tmp_path):
    task = tasks["seedling_video_find"]
    document = next(iter(task.test_docs()))
    (turn,) = task.config.doc_to_messages(document, {"mp4": str(tmp_path)})
    path = turn["content"][0]["url"]
    assert Path(path).parent == tmp_path
    rule = VideoSpec(frames=112)
    parts = (
        [{"type": "video", "video": path}],
        [{"type": "video", "video": in_memory(benchmarks.sample_clip(document))}],
    )
    file, memory = (
        media_of(0, [{"role": "user", "content": part}], rule).clips[0] for part in parts
    )
    assert np.array_equal(file.frames, memory.frames)


def test_the_key_of_a_run_hashes_all_that_makes_samples():
    """Each file that the tasks import from the package of clips or from seedling is among the sources."""
    text = (CONF / "benchmark" / "seedling_video_caption.yaml").read_text()
    named = set(re.findall(r"^  - pkg://espalier/(harness/\S+)", text, flags=re.MULTILINE))
    package = Path(benchmarks.__file__).parent
    made = {path.name for path in package.glob("*.py")} - {"__init__.py", "clip_sheet.py"}
    assert {f"harness/seedling/video/{name}" for name in made} <= named
    for path in package.glob("*.py"):
        for line in path.read_text().splitlines():
            if line.startswith("from espalier.harness.seedling.") and path.name != "clip_sheet.py":
                module = line.split()[1].removeprefix("espalier.").replace(".", "/")
                assert f"{module}.py" in named or module.endswith("/video"), line
