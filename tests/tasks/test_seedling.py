from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.seedling import crowd
from espalier.harness.seedling import scene_benchmarks as benchmarks
from espalier.harness.seedling.scene_benchmarks import (
    box_score,
    caption_score,
    exact_match,
    iou,
    reading_score,
    yes_or_no,
)
from espalier.harness.seedling.scenes import SceneObject

TASKS = Path(__file__).parents[2] / "tasks"
FOLDER = TASKS / "seedling"
FOLDERS = (FOLDER, TASKS / "seedling_crowd")
METRICS = {
    "seedling_vqa": benchmarks.vqa_metrics,
    "seedling_exist": benchmarks.exist_metrics,
    "seedling_rec": benchmarks.rec_metrics,
    "seedling_ocr": benchmarks.ocr_metrics,
    "seedling_caption": benchmarks.caption_metrics,
    "seedling_crowd": crowd.crowd_metrics,
}
#: The benchmarks on scenes, without that on crowds of objects.
SCENES = [name for name in METRICS if name != "seedling_crowd"]
HEADLINES = {
    "seedling_vqa": "accuracy",
    "seedling_exist": "accuracy",
    "seedling_rec": "acc_at_50",
    "seedling_ocr": "one_minus_ned",
    "seedling_caption": "object_recall",
    "seedling_crowd": "accuracy",
}
WEIRD = [
    "",
    " ",
    "\n\n",
    "yes no",
    "<loc_99> <loc_-1> <loc_> 4",
    "<loc_31> <loc_31> <loc_0> <loc_0>",
    "a red frame with digit",
    "ünïcode ✓ 💥",
    "; ; ;",
    "9" * 5000,
]
OBJECTS = (
    SceneObject("digit", "7", "red", (8, 8, 24, 24)),
    SceneObject("shape", "star", "blue", (40, 40, 60, 60)),
)
CAPTION = "a red frame with digit 7 at <loc_5> <loc_5> ; a blue star at <loc_16> <loc_16> ;"


def data_of(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.mark.sampled
@pytest.mark.parametrize("name", METRICS)
def test_task_gives_documents_with_images(tasks, name):
    task = tasks[name]
    documents = list(task.test_docs())
    assert len({document["index"] for document in documents}) == 500
    document = documents[0]
    image, text = task.doc_to_messages(document)[0]["content"]
    edge = 96 if name in SCENES else 192
    assert image["url"].size == (edge, edge)
    assert text["text"] == document["question"] == task.doc_to_text(document)
    assert task.doc_to_visual(document)[0].tobytes() == image["url"].tobytes()
    assert task.doc_to_target(document) == document["answer"]
    assert task.config.generation_kwargs["max_new_tokens"] > 0
    assert task.config.generation_kwargs["until"]
    assert task.VERSION is not None


@pytest.mark.parametrize("name", METRICS)
def test_right_answers_score_full_marks(tasks, name):
    task = tasks[name]
    for document in list(task.test_docs())[:60]:
        scores = task.process_results(document, [document["answer"]])
        assert (scores[HEADLINES[name]], scores["unparsed"]) == (1.0, 0.0)


@pytest.mark.sampled
@pytest.mark.parametrize("name", METRICS)
def test_every_reported_metric_is_declared_and_comes_up(tasks, name):
    task = tasks[name]
    reported = set()
    for document in task.test_docs():
        reported |= set(task.process_results(document, [document["answer"]]))
    assert reported == set(task.aggregation()) == set(task.higher_is_better())


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("answer", WEIRD)
def test_weird_answers_never_raise_and_score_nothing(name, answer):
    for sample in benchmarks.samples(**{**data_of(name), "count": 8}):
        scores = METRICS[name](sample, answer)
        if answer != "yes no":  # starts with a valid yes
            assert scores[HEADLINES[name]] == 0.0
        if not answer.strip():
            assert scores["unparsed"] == 1.0


def test_benchmarks_use_scenes_of_their_own():
    taken: set[tuple] = set()
    for name in SCENES:
        used = {(s["split"], s["seed"], s["index"]) for s in benchmarks.samples(**data_of(name))}
        assert len(used) == 500
        assert not used & taken
        assert {split for split, _, _ in used} == {"test"}
        taken |= used


def test_samples_do_not_depend_on_how_many_there_are():
    data = data_of("seedling_vqa")
    assert benchmarks.samples(**data)[:10] == benchmarks.samples(**{**data, "count": 10})


def test_existence_is_balanced():
    answers = [s["answer"] for s in benchmarks.samples(**data_of("seedling_exist"))]
    assert answers.count("yes") == answers.count("no") == 250


def test_vqa_has_every_family_and_template():
    samples = benchmarks.samples(**data_of("seedling_vqa"))
    families = [s["family"] for s in samples]
    assert [families.count(f) for f in ("attr", "exist", "count")] == [250, 125, 125]
    assert len({(s["family"], s["template"]) for s in samples}) == 10


def caption_marks(*marks: float) -> dict[str, float]:
    names = ("object_recall", "object_precision", "object_close", "unparsed")
    return dict(zip(names, marks, strict=True))


#: Scores by hand: function, arguments, value.
BY_HAND: tuple[tuple[Callable[..., Any], tuple[Any, ...], Any], ...] = (
    (exact_match, ("red", "red"), 1),
    (exact_match, (" Red. ", "red"), 1),
    (exact_match, ("red red", "red"), 0),
    (exact_match, ("", "red"), 0),
    (exact_match, ("12", "1"), 0),
    (yes_or_no, ("yes",), "yes"),
    (yes_or_no, ("No.",), "no"),
    (yes_or_no, ("yes it is",), "yes"),
    (yes_or_no, ("maybe",), ""),
    (yes_or_no, ("",), ""),
    (iou, ((0, 0, 10, 10), (0, 0, 10, 10)), 1),
    (iou, ((0, 0, 10, 10), (10, 10, 20, 20)), 0),
    (iou, ((0, 0, 10, 10), (5, 0, 15, 10)), 1 / 3),
    (iou, ((10, 10, 0, 0), (0, 0, 10, 10)), 0),
    (iou, ((5, 5, 5, 5), (5, 5, 5, 5)), 0),
    (box_score, ("<loc_9> <loc_9> <loc_2> <loc_2>", (0, 0, 30, 30)), (0.0, True)),
    (box_score, ("<loc_9> <loc_9>", (0, 0, 30, 30)), (0.0, False)),
    (reading_score, ("1 2 3", "1 2 3"), 1),
    (reading_score, ("1 2", "1 2 3"), 2 / 3),
    (reading_score, ("1 9 3", "1 2 3"), 2 / 3),
    (reading_score, ("1 2 3 4", "1 2 3"), 3 / 4),
    (reading_score, ("", "1 2 3"), 0),
    (reading_score, ("4 5 6 7", "1 2 3"), 0),
    (caption_score, (CAPTION, OBJECTS), caption_marks(1, 1, 1, 0)),
    # Naming an object twice costs precision.
    (caption_score, (CAPTION + CAPTION, OBJECTS), caption_marks(1, 0.5, 1, 0)),
    (
        caption_score,
        ("a red frame with digit 7 at <loc_31> <loc_5> ; a red star ;", OBJECTS),
        caption_marks(0.5, 0.5, 0, 0),
    ),
    (caption_score, ("", OBJECTS), caption_marks(0, 0, 0, 1)),
    (benchmarks.f1_of_yes, ([["yes", "yes"], ["no", "no"]],), 1),
    (benchmarks.f1_of_yes, ([["yes", "no"], ["no", "yes"]],), 0),
    (benchmarks.f1_of_yes, ([["yes", ""], ["no", ""]],), 0),
    (benchmarks.f1_of_yes, ([["yes", "yes"], ["no", "yes"]],), 2 / 3),
)


@pytest.mark.parametrize(("function", "arguments", "value"), BY_HAND)
def test_scores_by_hand(function: Callable[..., Any], arguments: tuple[Any, ...], value: Any):
    expected = pytest.approx(value) if isinstance(value, int | float) else value
    assert function(*arguments) == expected


@pytest.mark.slow
def test_tasks_work_from_another_folder(tmp_path: Path):
    """Task files are found by path: nothing may depend on the working directory."""
    code = (
        "import sys, runpy; "
        f"u = runpy.run_path({str(FOLDER / 'utils.py')!r}); "
        "d = u['benchmarks'].samples('seedling_rec', 'test', 0, 5, 1)[0]; "
        "print(u['doc_to_visual'](d)[0].size)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "(96, 96)", done.stderr
