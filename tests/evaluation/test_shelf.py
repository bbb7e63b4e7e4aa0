"""What cells of one command share of an opened benchmark is as if each had opened it for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import lmms_eval.tasks
import pytest
import yaml
from lmms_eval.tasks import TaskManager

from espalier.harness.evaluation.evaluate import Evaluation, evaluate_session, open_benchmark
from espalier.harness.evaluation.lmms_tasks import load_tasks, manager_of
from espalier.harness.evaluation.task_cache import TaskCache
from espalier.harness.store.files.journal import Journal
from tests.arithmetic import Calculator, make_spec, sums, write_task

#: Functions that write into the document, its nested values too, and count in their module.
SPOILING = """
seen = []

def question(doc, lmms_eval_specific_kwargs=None):
    text = doc["question"]
    doc["question"], doc["more"]["deep"] = "1+1", "gone"
    seen.append(text)
    return f"{text}+{len(seen)}"

def score(doc, results):
    whole = doc["target"] != "gone" and doc["more"]["deep"] == "here"
    doc["target"] = doc["more"]["deep"] = "gone"
    return {"right": float(whole)}

def prepared(docs):
    return docs.map(lambda doc: {"more": {"deep": "here"}})
"""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns what has been read: indices of task files, and data sets."""
    names: list[str] = []

    def note(owner: Any, name: str) -> None:
        plain = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, **more: names.append(name) or plain(*args, **more)
        )

    note(TaskManager, "initialize_tasks")
    note(datasets, "load_dataset")
    return names


def spoiling(folder: Path) -> Path:
    write_task(folder, sums(3), "process_docs: !function utils.prepared\n")
    (folder / "utils.py").write_text((folder / "utils.py").read_text() + SPOILING)
    return folder


def answered(folder: Path, journal: Path, shelf: TaskCache | None) -> Evaluation:
    spec = make_spec(folder)
    loaded = open_benchmark(spec, None, shelf)
    return evaluate_session(spec, Calculator(), Journal(journal), loaded=loaded)


def test_a_task_that_writes_into_its_documents_spoils_no_other_cell(
    tmp_path: Path, read: list[str]
) -> None:
    """The third cell sees what the first saw, in documents and in the state of the task's own functions."""
    folder, shelf = spoiling(tmp_path / "t"), TaskCache()
    alone = answered(folder, tmp_path / "alone.jsonl", None)
    assert alone.metrics["right"]["value"] == 1.0
    del read[:]
    for number in range(3):
        cell = answered(folder, tmp_path / f"{number}.jsonl", shelf)
        assert [sample.answer for sample in cell.samples] == [
            sample.answer for sample in alone.samples
        ]
        assert (cell.metrics, cell.scores) == (alone.metrics, alone.scores)
    assert read == ["initialize_tasks", "load_dataset"]


def test_what_is_taken_off_the_shelf_is_a_copy(tmp_path: Path) -> None:
    folder, shelf = write_task(tmp_path / "t", sums(3)), TaskCache()
    (first,) = load_tasks("sums", folder, shelf=shelf).tasks
    first.dataset["test"] = first.dataset["test"].select([2])
    first.dataset_no_image["test"].set_format("numpy")
    first.config.dataset_kwargs["data_files"]["test"] = "gone"
    load_tasks("sums", folder, shelf=shelf).manager.task_index.clear()
    (second,) = load_tasks("sums", folder, shelf=shelf).tasks
    (alone,) = load_tasks("sums", folder).tasks
    assert len(second.dataset["test"]) == 3
    assert second.dataset_no_image["test"].format["type"] is None
    assert second.config.dataset_kwargs == alone.config.dataset_kwargs


def test_data_are_kept_of_one_benchmark_as_it_was_asked_for(
    tmp_path: Path, read: list[str]
) -> None:
    """Another template may have other data; who comes back after another benchmark reads again."""
    shelf = TaskCache()
    first, other = (write_task(tmp_path / name, sums(n)) for name, n in (("a", 2), ("b", 3)))
    for folder, template, count in (
        (first, None, 2),
        (other, None, 3),
        (first, None, 2),
        (first, "llava", 2),
    ):
        (task,) = load_tasks("sums", folder, template=template, shelf=shelf).tasks
        assert len(task.test_docs()) == count
    assert (read.count("initialize_tasks"), read.count("load_dataset")) == (2, 4)
    assert len(shelf.data) == 1


@pytest.mark.parametrize(
    "folder",
    ["mme", "mmmu", pytest.param("", marks=pytest.mark.exhaustive)],
    ids=["tasks", "groups", "all"],
)
def test_an_index_is_the_one_that_lmms_eval_reads(folder: str) -> None:
    place = Path(lmms_eval.tasks.__file__).parent / folder
    plain = TaskManager(include_path=str(place), include_defaults=False)
    manager = manager_of(TaskCache(), [str(place)], False, None)
    assert manager.task_index == plain.task_index
    assert plain.task_index
    assert yaml.full_load.__module__ == "yaml"  # as before
