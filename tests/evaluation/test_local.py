"""Tasks that ask the hub for data sets, served from a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from espalier.harness.errors import UserError
from espalier.harness.evaluation.data_sources import LocalData, allowed_sources, local_data
from espalier.harness.evaluation.lmms_tasks import load_tasks
from espalier.harness.specs.benchmark_spec import BenchmarkSpec, DatasetSpec
from espalier.harness.store.files.dataset_copies import Copies, revision
from espalier.harness.store.files.digests import Digests
from tests.refused import refused

TASK = """
task: asked
dataset_path: somebody/questions
dataset_name: words
test_split: test
output_type: generate_until
doc_to_visual: !function utils.images
doc_to_text: !function utils.text
doc_to_target: target
process_docs: !function utils.process
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""

UTILS = """
import os
from datasets import load_dataset
from huggingface_hub import hf_hub_download, snapshot_download

HOME = os.environ["HF_HOME"]

def process(docs):
    second = load_dataset("somebody/questions", "images", split="test", token=True)
    hints = dict(zip(second["id"], second["hint"]))
    return docs.map(lambda doc: {"hint": hints[doc["id"]]})

def images(doc):
    return []

def text(doc, lmms_eval_specific_kwargs=None):
    return doc["question"] + doc["hint"]

def downloaded():
    return hf_hub_download("somebody/questions", "media/note.txt", repo_type="dataset")

def snapshot():
    return snapshot_download(repo_id="somebody/questions", repo_type="dataset")
"""

VIDEO = """
dataset_kwargs: {video: true, cache_dir: clips}
"""

CARD = """---
configs:
- config_name: words
  data_files: [{split: test, path: words/test-*}]
- config_name: images
  data_files: [{split: test, path: images/test-*}]
---
"""


def write_copy(folder: Path, question: str = "what", hint: str = "?") -> Path:
    """Write a repository of two data sets, a note and an archive."""
    for name in ("words", "images", "media"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(CARD)
    words = pa.table({"id": [1], "question": [question], "target": ["a"]})
    pq.write_table(words, folder / "words/test-00000-of-00001.parquet")
    hints = pa.table({"id": [1], "hint": [hint]})
    pq.write_table(hints, folder / "images/test-00000-of-00001.parquet")
    (folder / "media/note.txt").write_text("note")
    with zipfile.ZipFile(folder / "clips.zip", "w") as archive:
        archive.writestr("one.mp4", "film")
    return folder


def write_task(folder: Path, more: str = "", utils: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "asked.yaml").write_text(TASK + more)
    (folder / "utils.py").write_text(UTILS + utils)
    return folder


def bench(path: Path | None, main: str | None = "somebody/questions") -> BenchmarkSpec:
    dataset = DatasetSpec(path=main)
    return BenchmarkSpec(
        "asked", "asked", None, None, ("exact_match",), "exact_match", dataset=dataset, path=path
    )


def opened(
    task: Path, path: Path, main: str | None = "somebody/questions"
) -> tuple[Any, LocalData]:
    data = local_data(bench(path, main))
    assert data is not None
    (loaded,) = load_tasks("asked", task, data=data).tasks
    return loaded, data


@pytest.mark.parametrize("place", ["", "somebody/questions"])
@pytest.mark.parametrize("main", ["somebody/questions", None])
def test_a_copy_lies_in_the_folder_or_under_its_owner(
    tmp_path: Path, place: str, main: str | None
) -> None:
    write_copy(tmp_path / "data" / place)
    task, _ = opened(write_task(tmp_path / "task"), tmp_path / "data", main)
    assert task.doc_to_text(task.test_docs()[0]) == "what?"


def test_a_changed_file_is_read_again_though_size_and_time_are_the_same(tmp_path: Path) -> None:
    copy, folder = write_copy(tmp_path / "data"), write_task(tmp_path / "task")
    opened(folder, copy)
    file = copy / "images/test-00000-of-00001.parquet"
    before = file.stat()
    write_copy(copy, hint="!")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    task, _ = opened(folder, copy)
    assert task.doc_to_text(task.test_docs()[0]) == "what!"


@pytest.mark.parametrize("local_dir", [None, "own"])
def test_equal_copies_share_what_is_prepared_and_no_links(
    tmp_path: Path, local_dir: str | None
) -> None:
    """A data set that was copied or moved is read where it lies now."""

    def linked(copy: Path) -> tuple[Path, Path]:
        data = local_data(bench(copy))
        with data.serving(loading=True):
            place = None if local_dir is None else data.home / local_dir
            folder = huggingface_hub.snapshot_download(
                "somebody/questions", repo_type="dataset", local_dir=place
            )
        note = allowed_sources(data, None, True).place(f"{folder}/media/note.txt")
        return data.home, Path(note).resolve()

    first = write_copy(tmp_path / "a")
    second = Path(shutil.copytree(first, tmp_path / "b"))
    home, note = linked(first)
    assert note == first / "media/note.txt"
    assert linked(second) == (home, second / "media/note.txt")
    assert linked(first) == (home, note)
    moved = first.rename(tmp_path / "c")
    assert linked(moved) == (home, moved / "media/note.txt")
    if local_dir is None:
        # Links of one copy stay while another is read.
        assert len(list((home / "linked").iterdir())) == 3


def test_what_is_prepared_lies_in_the_cache_and_nothing_beside_the_copy(tmp_path: Path) -> None:
    copy = write_copy(tmp_path / "data")
    before = sorted(copy.rglob("*"))
    _, data = opened(write_task(tmp_path / "task", VIDEO), copy)
    assert sorted(copy.rglob("*")) == before
    assert data.home.is_relative_to(tmp_path / "cache")
    assert list(data.home.rglob("*.arrow"))
    assert (data.home / "clips/one.mp4").read_text() == "film"


def test_what_was_unpacked_in_part_is_unpacked_again(tmp_path: Path) -> None:
    copy, folder = write_copy(tmp_path / "data"), write_task(tmp_path / "task", VIDEO)
    home = local_data(bench(copy)).home  # type: ignore[union-attr]
    (home / "clips").mkdir(parents=True)
    opened(folder, copy)
    assert (home / "clips/one.mp4").exists()


def test_functions_of_a_task_find_files_while_it_is_served_and_ask_the_hub_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def hub(repo_id: str, *args: Any, **more: Any) -> str:
        calls.append(repo_id)
        return "the hub's"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub)
    task, data = opened(write_task(tmp_path / "task"), write_copy(tmp_path / "data"))
    functions: dict[str, Callable[[], str]] = task.config.doc_to_visual.__globals__
    assert functions["HOME"] == str(data.home)
    assert huggingface_hub.snapshot_download is hub
    with data.serving():
        assert Path(functions["downloaded"]()).read_text(encoding="utf-8") == "note"
        assert (Path(functions["snapshot"]()) / "words/test-00000-of-00001.parquet").exists()
        assert os.environ["HF_HOME"] == str(data.home)
    assert not calls
    assert functions["downloaded"]() == functions["snapshot"]() == "the hub's"
    assert os.environ.get("HF_HOME") != str(data.home)


def test_a_data_set_that_is_not_there_is_named_with_what_is(tmp_path: Path) -> None:
    write_copy(tmp_path / "data/somebody/answers")
    line = refused(local_data, bench(tmp_path / "data"))
    assert line.startswith("benchmark.path=")
    assert "'somebody/questions'" in line
    assert "there is: somebody/answers" in line
    # Asked for by the task alone.
    assert "no data set 'somebody/questions'; there is: somebody/answers" in refused(
        opened, write_task(tmp_path / "task"), tmp_path / "data", None
    )


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"benchmark.path='.*none' is not a folder"):
        Copies(tmp_path / "none", "somebody/questions").check()


def test_a_second_data_set_that_the_key_does_not_know_is_refused(tmp_path: Path) -> None:
    write_copy(tmp_path / "data/somebody/questions")
    write_copy(tmp_path / "data/somebody/others")
    utils = UTILS.replace('load_dataset("somebody/questions"', 'load_dataset("somebody/others"')
    folder = write_task(tmp_path / "task")
    (folder / "utils.py").write_text(utils)
    assert "the task reads 'somebody/others' besides 'somebody/questions'" in refused(
        opened, folder, tmp_path / "data"
    )
    task, _ = opened(folder, tmp_path / "data", None)
    assert task.doc_to_text(task.test_docs()[0]) == "what?"


def test_the_revision_is_that_of_names_and_contents(tmp_path: Path) -> None:
    copy = write_copy(tmp_path / "a")
    first = revision(copy, Digests())
    assert revision(write_copy(tmp_path / "b"), Digests()) == first
    (copy / ".cache").mkdir()
    (copy / ".cache/lock").write_text("hidden")
    assert revision(copy, Digests()) == first
    (copy / "media/note.txt").rename(copy / "media/other.txt")
    assert revision(copy, Digests()) != first


def test_large_files_are_read_once(tmp_path: Path) -> None:
    copy = write_copy(tmp_path / "data")
    for file in copy.rglob("*.*"):
        os.utime(file, (1, 1))
    first = revision(copy, Digests())

    class Refusing(Digests):
        def file(self, path: Path) -> str:
            raise AssertionError(f"{path} is read again")

    assert revision(copy, Refusing()) == first
    os.utime(copy / "clips.zip", (2, 2))
    with pytest.raises(AssertionError, match=r"clips\.zip is read again"):
        revision(copy, Refusing())


def test_only_the_benchmarks_own_data_set_counts(tmp_path: Path) -> None:
    write_copy(tmp_path / "data/somebody/questions")
    copies = Copies(tmp_path / "data", "somebody/questions")
    every = replace(copies, main=None)
    first, all_first = copies.revision(Digests()), every.revision(Digests())
    write_copy(tmp_path / "data/somebody/others")
    assert copies.revision(Digests()) == first
    assert every.revision(Digests()) != all_first


def test_a_cache_without_locks_is_told_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    write_task(tmp_path / "task")
    write_copy(tmp_path / "copy")
    monkeypatch.setattr(fcntl, "flock", refuse)
    line = refused(opened, tmp_path / "task", tmp_path / "copy")
    assert "No locks available" in line
    assert line.endswith(
        "; valid: HF_DATASETS_CACHE=<a folder on a local disk>, on a file system with locks"
    )
