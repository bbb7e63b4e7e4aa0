"""The video tasks: which videos are asked about, what is asked, and how answers are scored."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import av
import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from lmms_eval.api.task import Task
from lmms_eval.tasks.mvbench.utils import DATA_LIST

import run
from espalier.harness.errors import UserError
from espalier.harness.evaluation.lmms_tasks import check_metrics, load_tasks, quiet
from espalier.harness.paths import CONF, ROOT
from espalier.harness.store import Store
from tests.families import FAMILIES
from tests.families.qwen import write_clip
from tests.tasks.media_tasks import tiny_model
from tests.tiny import save_tiny

FOLDER = ROOT / "tasks/videos"

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


def copy_task(folder: Path, name: str, **metadata: object) -> Path:
    """Return a folder with the task's files and other entries in its metadata."""
    shutil.copytree(FOLDER, folder / "tasks", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / f"tasks/{name}.yaml"
    text, replaced = re.subn(
        r"^metadata:\n(  .*\n)*", yaml.dump({"metadata": metadata}), file.read_text(), flags=re.M
    )
    assert replaced == 1
    file.write_text(text)
    return folder / "tasks"


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Videos of 59, 60 and 61 seconds and what else is asked for, one frame a second."""
    folder = tmp_path_factory.mktemp("clips")
    paths = {seconds: folder / f"{seconds}.mp4" for seconds in (4, 59, 60, 61)}
    for seconds, path in paths.items():
        write_clip(path, frames=seconds, height=32, width=32, fps=1)
    return paths


def stand_in(path: Path, clip: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(clip, path)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clips: dict[int, Path]) -> Any:
    """Load a task with a data set of two documents a video in the place of the published one."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))

    def loaded(
        name: str, seconds: tuple[int | None, ...] = (61, 61, 61), tasks: Path = FOLDER
    ) -> Task:
        doc, split, file = DOCS[name]
        # What is unpacked is not fetched again.
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        for number, length in enumerate(seconds):
            if length is not None:
                stand_in(tmp_path / file.format(n=number), clips[length])
        filled = [
            {k: v.format(n=n) for k, v in doc.items()}
            for n in range(len(seconds))
            for _ in range(2)
        ]
        data = DatasetDict({split: Dataset.from_list(filled)})
        monkeypatch.setattr("datasets.load_dataset", lambda **_: data)
        return only(name, tasks)

    return loaded


def only(name: str, tasks: Path) -> Task:
    with quiet():
        (task,) = load_tasks(name, tasks).tasks
    return task


def test_every_task_is_here_and_has_a_config() -> None:
    files = {path.stem for path in FOLDER.glob("*.yaml")}
    assert files == {*DOCS, "mvbench_describe", "video_detail_caption_judged"}
    assert files <= {path.stem for path in (CONF / "benchmark").glob("*.yaml")}


@pytest.mark.parametrize("name", DOCS)
def test_each_video_is_asked_about_once(load: Any, name: str) -> None:
    doc, _, file = DOCS[name]
    task = load(name)
    docs = list(task.eval_docs)
    key = next(iter(doc))
    assert sorted(sample[key] for sample in docs) == [doc[key].format(n=n) for n in range(3)]
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
        [doc["video_name"] for doc in load("video_detail_caption").eval_docs] for _ in range(2)
    ]
    assert orders[0] == orders[1] != sorted(orders[0])


@pytest.mark.parametrize("name", DOCS)
def test_short_videos_are_left_out_before_a_sample_is_drawn(
    load: Any, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    doc, _, _ = DOCS[name]
    key = next(iter(doc))
    docs = load(name, (59, 61, 4, 60)).eval_docs
    assert sorted(sample[key] for sample in docs) == [doc[key].format(n=n) for n in (1, 3)]
    # Not a terminal: one line, no bar.
    assert capsys.readouterr().err == f"{name}: 2 of 4 videos last at least 60 s\n"


@pytest.mark.parametrize(("shortest", "left"), [(4, 3), (4.5, 2), (60.5, 1)])
def test_the_threshold_is_the_task_files(
    load: Any, tmp_path: Path, shortest: float, left: int
) -> None:
    tasks = copy_task(tmp_path, "mlvu_describe", shortest_seconds=shortest)
    assert len(load("mlvu_describe", (4, 59, 61), tasks).eval_docs) == left


def test_threshold_0_reads_no_video(load: Any, tmp_path: Path) -> None:
    tasks = copy_task(tmp_path, "mlvu_describe", shortest_seconds=0)
    task = load("mlvu_describe", (None, None), tasks)
    assert len(task.eval_docs) == 2
    with pytest.raises(FileNotFoundError, match=r"mlvu/plot/\d\.mp4' does not exist"):
        task.config.doc_to_messages(task.eval_docs[0])


@pytest.mark.parametrize("metadata", [{}, {"shortest_seconds": -1}, {"shortest_seconds": "60 s"}])
def test_a_threshold_that_is_no_length_is_refused(
    load: Any, tmp_path: Path, metadata: dict[str, object]
) -> None:
    tasks = copy_task(tmp_path, "mlvu_describe", version=2.0, **metadata)
    with pytest.raises(UserError, match=r"^benchmark\.task='mlvu_describe': metadata\.shortest_"):
        load("mlvu_describe", (61,), tasks)


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        ((61, None), r"'mlvu_describe': .*mlvu/plot/1\.mp4' does not"),
        # If none is long enough the longest is told.
        ((4, 59), r"none of its 2 videos lasts .*=60; .* 59\.0 s"),
    ],
)
def test_videos_that_are_missing_or_short_are_one_line(
    load: Any, seconds: tuple[int | None, ...], line: str
) -> None:
    with pytest.raises(UserError, match=line):
        load("mlvu_describe", seconds)


def test_a_file_that_is_no_video_is_named(load: Any, tmp_path: Path) -> None:
    (tmp_path / "mlvu/plot").mkdir(parents=True)
    (tmp_path / "mlvu/plot/1.mp4").write_bytes(b"frames")
    with pytest.raises(UserError, match=r"'mlvu_describe': .*1\.mp4' cannot be opened"):
        load("mlvu_describe", (61, None))


def test_a_length_that_no_header_states_is_counted(load: Any, tmp_path: Path, clips: Any) -> None:
    """A stream that was recorded as it came has no length in its header."""
    path = tmp_path / "videomme/data/v0.mkv"
    path.parent.mkdir(parents=True)
    with (
        av.open(str(clips[61])) as source,
        av.open(str(path), "w", format="matroska", options={"live": "1"}) as out,
    ):
        stream = out.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                out.mux(packet)
    with av.open(str(path)) as container:
        assert container.duration is None
    assert len(load("videomme_describe", (None,)).eval_docs) == 1
    tasks = copy_task(tmp_path, "videomme_describe", shortest_seconds=62)
    with pytest.raises(UserError, match=r"the longest lasts 61\.0 s"):
        load("videomme_describe", (None,), tasks)


@pytest.fixture
def mvbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clips: dict[int, Path]) -> Any:
    """Load MVBench: each subtask asks twice about a long video of its folder and once about a short one."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    requests: list[dict[str, Any]] = []

    def of_subtask(**wanted: Any) -> DatasetDict:
        requests.append(wanted)
        names = ["long.mp4", "long.mp4", "short.mp4"]
        return DatasetDict({"train": Dataset.from_list([{"video": name} for name in names])})

    for folder in DATA_LIST.values():
        stand_in(tmp_path / "mvbench_video" / folder / "long.mp4", clips[61])
        stand_in(tmp_path / "mvbench_video" / folder / "short.mp4", clips[4])
    monkeypatch.setattr("datasets.load_dataset", of_subtask)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    (tmp_path / "datasets" / "OpenGVLab___mv_bench").mkdir(parents=True)
    return requests, lambda tasks=FOLDER: only("mvbench_describe", tasks)


def test_mvbench_is_all_subtasks_each_video_once(
    mvbench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    requests, opened = mvbench
    task = opened()
    assert (len(requests), {request["name"] for request in requests}) == (20, set(DATA_LIST))
    assert all(
        (request["path"], request["revision"]) == ("OpenGVLab/MVBench", "video")
        for request in requests
    )
    # What lmms-eval alone understands is no argument of the data library.
    assert not any({"video", "create_link"} & request.keys() for request in requests)
    folders = set(DATA_LIST.values())
    docs = list(task.eval_docs)
    # Subtasks share folders, and equal names in different folders are different videos.
    assert sorted(doc["video_path"] for doc in docs) == sorted(
        f"{folder}/long.mp4" for folder in folders
    )
    assert [doc["video_path"] for doc in docs] != sorted(doc["video_path"] for doc in docs)
    assert all(DATA_LIST[doc["subtask"]] in doc["video_path"] for doc in docs)
    counted = f"{len(folders)} of {2 * len(folders)} videos last at least 60 s"
    assert capsys.readouterr().err == f"mvbench_describe: {counted}\n"


def test_mvbench_asks_for_descriptions(mvbench: Any, tmp_path: Path) -> None:
    task = mvbench[1]()
    check_metrics([task], ["words"])
    doc = task.eval_docs[0]
    (turn,) = task.config.doc_to_messages(doc)
    video, text = turn["content"]
    assert video == {"type": "video", "url": str(tmp_path / "mvbench_video" / doc["video_path"])}
    assert Path(video["url"]).is_file()
    assert text["text"] == task.config.doc_to_text(doc)
    assert task.config.generation_kwargs["max_new_tokens"] == 512
    assert task.process_results(doc, ["A dog, and a cat"]) == {"words": 5}


def test_mvbench_without_a_threshold_takes_short_videos(mvbench: Any, tmp_path: Path) -> None:
    tasks = copy_task(tmp_path, "mvbench_describe", shortest_seconds=0)
    assert len(mvbench[1](tasks).eval_docs) == 2 * len(set(DATA_LIST.values()))


def test_mvbench_runs(mvbench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = FAMILIES["qwen2_5_vl"].spec
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = tiny_model("qwen2_5_vl_7b", spec, save_tiny(spec, tmp_path / "model"))
    settings = ["limit=2", "engine.warmup=0", "++benchmark.generation.max_new_tokens=3"]
    settings.append("json=true")
    assert run.main([f"store={tmp_path}", "benchmark=mvbench_describe", *model, *settings]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["n_samples"] == 2
    journal = Store(tmp_path).run(row["run_key"]).journal
    answers = [entry["answer"] for entry in journal.entries() if "answer" in entry]
    counts = [len(re.findall(r"\w+", answer)) for answer in answers]
    assert (len(answers), row["metrics"]["words"]["value"]) == (2, sum(counts) / 2)


def test_mvbench_has_the_subtasks_of_lmms_eval() -> None:
    import lmms_eval.tasks.mvbench as package

    (folder,) = package.__path__
    lines = [file.read_text() for file in Path(folder).glob("mvbench_*.yaml")]
    named = {re.search(r"^dataset_name: (\w+)", text, flags=re.M)[1] for text in lines}  # type: ignore[index]
    assert named == set(DATA_LIST)


DETAIL = "video_detail_caption"


@pytest.mark.parametrize(
    ("name", "answer", "scores"),
    [
        (DETAIL, "A dog runs over the lawn.", {"rouge_l": 1.0, "words": 6}),
        (DETAIL, "a DOG runs, over -- the lawn", {"rouge_l": 1.0, "words": 6}),
        # The longest common subsequence is `dog runs the lawn`: P = 4/5, R = 4/6, F1 = 8/11.
        (DETAIL, "the dog runs the lawn", {"rouge_l": 8 / 11, "words": 5}),
        # Order counts: of `lawn` and `dog` only one is left.
        (DETAIL, "lawn dog", {"rouge_l": 2 / 8, "words": 2}),
        (DETAIL, "nothing", {"rouge_l": 0.0, "words": 1}),
        (DETAIL, "", {"rouge_l": 0.0, "words": 0}),
        # Descriptions without a reference are counted.
        ("videomme_describe", "A dog, and a cat", {"words": 5}),
    ],
)
def test_descriptions_are_scored_by_their_longest_common_subsequence(
    load: Any, name: str, answer: str, scores: dict[str, float]
) -> None:
    task = load(name)
    check_metrics([task], list(scores))
    assert task.process_results(task.eval_docs[0], [answer]) == pytest.approx(scores)


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
