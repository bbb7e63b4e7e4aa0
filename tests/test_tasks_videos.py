"""The video tasks: which videos are asked about, what is asked, and how answers are scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from lmms_eval.api.task import Task

from harness.config.compose import CONF
from harness.config.spec import ROOT
from harness.errors import UserError
from harness.evaluation.tasks import check_metrics, load_tasks, quiet

#: Task: a document of its data set, its split, and where lmms-eval unpacks the video of that document.
DOCS: dict[str, tuple[dict[str, str], str, str]] = {
    "video_detail_caption": (
        {"video_name": "v_{n}", "question": "What happens?", "answer": "A dog runs over the lawn."},
        "test",
        "videochatgpt/Test_Videos/v_{n}.mp4",
    ),
    "videomme_describe": ({"videoID": "v{n}"}, "test", "videomme/data/v{n}.mkv"),
    "mlvu_describe": ({"video_name": "plot/{n}.mp4"}, "test", "mlvu/plot/{n}.mp4"),
    "longvideobench_describe": (
        {"video_path": "{n}.mp4"},
        "validation",
        "datasets/longvideobench/videos/{n}.mp4",
    ),
}


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a task with a data set of six documents about three videos in the place of the published one."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))

    def loaded(name: str, n_files: int = 3) -> Task:
        doc, split, file = DOCS[name]
        # What is unpacked is not fetched again.
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        filled = [{k: v.format(n=n) for k, v in doc.items()} for n in (0, 0, 1, 1, 2, 2)]
        for number in range(n_files):
            (tmp_path / file.format(n=number)).write_bytes(b"frames")
        data = DatasetDict({split: Dataset.from_list(filled)})
        monkeypatch.setattr("datasets.load_dataset", lambda **_: data)
        with quiet():
            (task,) = load_tasks(name, ROOT / "tasks").tasks
        return task

    return loaded


def test_every_task_is_here_and_has_a_config() -> None:
    files = {path.stem for path in (ROOT / "tasks/videos").glob("*.yaml")}
    assert files == set(DOCS)
    assert files <= {path.stem for path in (CONF / "benchmark").glob("*.yaml")}


@pytest.mark.parametrize("name", DOCS)
def test_each_video_is_asked_about_once(load: Any, name: str) -> None:
    doc, _, file = DOCS[name]
    task = load(name)
    docs = list(task.eval_docs)
    key = next(iter(doc))
    assert sorted(one[key] for one in docs) == [doc[key].format(n=n) for n in range(3)]
    (turn,) = task.config.doc_to_messages(docs[0])
    video, text = turn["content"]
    number = [doc[key].format(n=n) for n in range(3)].index(docs[0][key])
    assert video["type"] == "video"
    assert video["url"].endswith("/" + file.format(n=number))
    assert task.config.doc_to_visual(docs[0]) == [video["url"]]
    assert text["text"] == task.config.doc_to_text(docs[0])
    assert text["text"] == doc.get("question", text["text"])
    assert len(text["text"]) > 10
    assert task.config.generation_kwargs["max_new_tokens"] == 512


def test_the_order_is_drawn_once(load: Any) -> None:
    orders = [
        [one["video_name"] for one in load("video_detail_caption").eval_docs] for _ in range(2)
    ]
    assert orders[0] == orders[1] != sorted(orders[0])


def test_a_missing_video_is_named(load: Any) -> None:
    task = load("mlvu_describe", n_files=0)
    with pytest.raises(FileNotFoundError, match=r"mlvu/plot/\d\.mp4' is not there"):
        task.config.doc_to_messages(task.eval_docs[0])


@pytest.mark.parametrize(
    ("answer", "rouge", "words"),
    [
        ("A dog runs over the lawn.", 1.0, 6),
        ("a DOG runs, over -- the lawn", 1.0, 6),
        # The longest common subsequence is `dog runs the lawn`: P = 4/5, R = 4/6, F1 = 8/11.
        ("the dog runs the lawn", 8 / 11, 5),
        # Order counts: of `lawn` and `dog` only one is left.
        ("lawn dog", 2 / 8, 2),
        ("nothing", 0.0, 1),
        ("", 0.0, 0),
    ],
)
def test_captions_are_scored_by_their_longest_common_subsequence(
    load: Any, answer: str, rouge: float, words: int
) -> None:
    task = load("video_detail_caption")
    check_metrics([task], ["rouge_l", "words"])
    found = task.process_results(task.eval_docs[0], [answer])
    assert found == {"rouge_l": pytest.approx(rouge), "words": words}


def test_descriptions_without_reference_are_counted(load: Any) -> None:
    task = load("videomme_describe")
    check_metrics([task], ["words"])
    assert task.process_results(task.eval_docs[0], ["A dog, and a cat"]) == {"words": 5}


def test_without_the_data_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with (
        quiet(),
        pytest.raises(UserError, match=r"video_detail_caption.*cannot be loaded") as error,
    ):
        load_tasks("video_detail_caption", ROOT / "tasks")
    assert "\n" not in str(error.value)
