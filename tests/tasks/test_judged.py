"""The judged tasks: what a judge is asked, what its verdicts are worth, and where MMBench-Video's videos come from."""

from __future__ import annotations

import math
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from lmms_eval.api.task import Task

from espalier.harness.errors import UserError
from espalier.harness.evaluation.data_sources import LocalData
from espalier.harness.evaluation.lmms_tasks import LoadedBenchmark, check_metrics, load_tasks, quiet
from espalier.harness.paths import ROOT
from espalier.harness.store.files.dataset_copies import Copies
from espalier.tasks.judged import utils
from tests.benchmarks.fixtures.judged import ABILITIES, clip, llava_bench, mmbench_video

JUDGED = ROOT / "tasks" / "judged"


CONVERSATION = {"category": "conv"}
THREE = {"dimensions": "['OCR', 'Counting', 'Physical Relation']"}
RATINGS = np.random.default_rng(0).integers(1, 11, (60, 2)).astype(float)
QUESTION = {"question": "q", "gpt_answer": "r", "category": "conv"}

#: What judges' verdicts are worth: function, arguments, value.
WORTH: tuple[tuple[Callable[..., Any], tuple[Any, ...], Any], ...] = (
    # The ratio is of sums, as the release reports it: (8, 4) and (2, 2) are 6 of 10.
    (
        utils.llava_ratio,
        (RATINGS.tolist(),),
        pytest.approx(RATINGS[:, 1].mean() / RATINGS[:, 0].mean() * 100),
    ),
    (utils.llava_ratio, ([[8, 4], [2, 2]],), pytest.approx(60)),
    (utils.llava_ratio, ([[0, 3]],), pytest.approx(math.nan, nan_ok=True)),
    # An answer counts for all and for its kind.
    (utils.llava_score, (CONVERSATION, ["Blue.", "8 7\nFine."]), {"all": [8, 7], "conv": [8, 7]}),
    # Groups are those of the tables, and a mark counts once for each.
    (utils.groups, ("['Counting']",), ["overall", "perception", "FP-S"]),
    (
        utils.groups,
        ("['Hallucination', 'Causal Reasoning', 'OCR']",),
        ["overall", "perception", "reasoning", "FP-S", "HL", "TR"],
    ),
    (
        utils.mmbench_video_score,
        (THREE, ["x", "2"]),
        {"overall": 2, "perception": 2, "reasoning": 2, "FP-S": 2, "RR": 2},
    ),
)

#: What cannot be scored: function, arguments, words of the error.
UNSCORED: tuple[tuple[Callable[..., Any], tuple[Any, ...], str], ...] = (
    (
        utils.llava_score,
        ({"category": "poem"}, ["Blue.", "8 7"]),
        "category='poem'; valid: conv, detail, complex",
    ),
    (utils.llava_score, (CONVERSATION, ["Blue.", "eight"]), "without two ratings"),
    *(
        (utils.groups, (text,), "dimensions=")
        for text in ("['Juggling']", "[]", "'Counting'", "['Counting', 'Juggling']")
    ),
    (utils.mmbench_video_score, (THREE, ["x", "7"]), "without a mark"),
)


@pytest.mark.parametrize(("function", "arguments", "value"), WORTH)
def test_verdicts_are_worth_what_the_release_reports(
    function: Callable[..., Any], arguments: tuple[Any, ...], value: Any
) -> None:
    assert function(*arguments) == value


@pytest.mark.parametrize(("function", "arguments", "line"), UNSCORED)
def test_what_cannot_be_scored_is_an_error(
    function: Callable[..., Any], arguments: tuple[Any, ...], line: str
) -> None:
    with pytest.raises(ValueError, match=line):
        function(*arguments)


@pytest.mark.parametrize("caption", [["x", "y"], "x\ny"])
def test_a_description_may_be_a_list_of_lines(caption: str | list[str]) -> None:
    assert utils.llava_parts({**QUESTION, "caption": caption}, "a")["context"] == "x\ny"


def test_every_ability_of_the_tables_is_in_a_group() -> None:
    assert len({ability for group in utils.ABILITIES.values() for ability in group}) == 26


Load = Callable[..., Task]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a task from a folder with its data set."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "home/datasets"))

    def loaded(name: str, root: Path) -> Task:
        data = LocalData(Copies(root), tmp_path / "home/local")
        with quiet():
            benchmark: LoadedBenchmark = load_tasks(name, ROOT / "tasks", data=data)
        (task,) = benchmark.tasks
        return task

    return loaded


@pytest.fixture
def root(tmp_path: Path) -> Path:
    mmbench_video(tmp_path / "data")
    return tmp_path / "data"


def videos(task: Task) -> list[Path]:
    return [Path(task.config.doc_to_visual(doc)[0]) for doc in task.eval_docs]


def test_every_question_has_its_video_out_of_the_pickles(load: Load, root: Path) -> None:
    task = load("mmbench_video", root)
    check_metrics([task], ["overall", "FP-S", "TR"])
    docs = list(task.eval_docs)
    assert len(docs) == len(ABILITIES)
    assert docs[0]["question"] == 'What is on page 0, after "the" title?'
    assert [path.name for path in videos(task)] == ["abc_0-xyz.mp4", "abc_1-xyz.mp4"] * 2
    assert [path.read_bytes() for path in videos(task)] == [clip(3), clip(4)] * 2
    (turn,) = task.config.doc_to_messages(docs[1])
    assert turn["content"] == [
        {"type": "video", "url": str(videos(task)[1])},
        {"type": "text", "text": docs[1]["question"]},
    ]


def test_videos_that_are_files_already_are_taken(load: Load, root: Path) -> None:
    folder = root / "opencompass/MMBench-Video"
    shutil.rmtree(folder / "video_pkl")
    (folder / "video").mkdir()
    for number in range(2):
        (folder / f"video/abc_{number}-xyz.mp4").write_bytes(b"as it is")
    assert {path.read_bytes() for path in videos(load("mmbench_video", root))} == {b"as it is"}


class Evil:
    """Would make a folder where it is unpacked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_a_pickle_runs_no_code(load: Load, root: Path, tmp_path: Path) -> None:
    file = root / "opencompass/MMBench-Video/video_pkl/video_chunk_0.pkl"
    file.write_bytes(pickle.dumps({"abc_0-xyz": Evil(tmp_path / "made")}))
    with pytest.raises(
        UserError, match=r"is damaged: it holds posix.mkdir; valid: names and bytes"
    ):
        load("mmbench_video", root)
    assert not (tmp_path / "made").exists()


TABLE, CHUNK = "MMBench-Video.tsv", "video_pkl/video_chunk_0.pkl"

#: A truncated pickle, an empty one, no table, no bytes, a path elsewhere, a text.
DAMAGE = (
    pickle.dumps({"abc_0-xyz": b"x" * 99})[:50],
    b"",
    pickle.dumps([b"x"]),
    pickle.dumps({"abc_0-xyz": "x"}),
    pickle.dumps({"../abc_0-xyz": b"x"}),
    b"not a pickle",
)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (
            lambda folder: (folder / "video_pkl/video_chunk_1.pkl").unlink(),
            r"split test, row 1: there is no video 'abc_1-xyz'",
        ),
        (
            lambda folder: (folder / TABLE).write_text(
                (folder / TABLE).read_text().replace("dimensions", "abilities", 1)
            ),
            r"split test has no column 'dimensions'; there is: index",
        ),
        *(
            (
                lambda folder, data=data: (folder / CHUNK).write_bytes(data),
                r"MMBench-Video: .*video_chunk_0.pkl' is damaged",
            )
            for data in DAMAGE
        ),
    ],
)
def test_data_that_cannot_be_used_are_named(
    damage: Callable[[Path], Any], line: str, load: Load, root: Path
) -> None:
    damage(root / "opencompass/MMBench-Video")
    with pytest.raises(UserError, match=line):
        load("mmbench_video", root)


# -------------------------------------------------------------------------------------------------- the words


@pytest.mark.parametrize("file", sorted(ROOT.glob("tasks/**/*.yaml")), ids=lambda path: path.stem)
def test_our_words_name_every_part_and_no_other(file: Path, load: Load, tmp_path: Path) -> None:
    text = file.read_text(encoding="utf-8").replace("!function", "")
    judge = (yaml.safe_load(text).get("metadata") or {}).get("judge")
    if judge is None:
        return
    assert judge["name"] == "espalier-v1"
    template = judge["user"]
    places = {"llava_bench": {"context"}}.get(file.stem, set()) | {
        "question",
        "reference",
        "answer",
    }
    assert {place for place in places if f"{{{place}}}" in template} == places
    assert template.count("{") == len(places)


def test_the_question_of_llava_bench_is_the_data_sets_own(load: Load, tmp_path: Path) -> None:
    llava_bench(tmp_path / "data")
    task = load("llava_bench", tmp_path / "data")
    doc = task.eval_docs[0]
    assert task.config.doc_to_text(doc) == doc["question"] == "What stands out?"
    assert task.config.doc_to_visual(doc)[0].mode == "RGB"
    assert task.config.generation_kwargs["max_new_tokens"] == 1024
    assert "until" not in task.config.generation_kwargs


def test_the_data_sets_are_those_of_the_tasks() -> None:
    for name in ("llava_bench", "mmbench_video"):
        conf = yaml.safe_load((ROOT / f"conf/benchmark/{name}.yaml").read_text())
        task = yaml.safe_load((JUDGED / f"{name}.yaml").read_text().replace("!function", ""))
        assert conf["dataset"]["path"] == task["dataset_path"]
        assert conf["dataset"]["split"] == task["test_split"]
        assert set(conf["metrics"]) == {entry["metric"] for entry in task["metric_list"]}
