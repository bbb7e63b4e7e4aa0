"""Loading the tasks of lmms-eval: at a revision, and without other processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import datasets
import pytest

from espalier.harness.evaluation.lmms_tasks import load_tasks
from espalier.harness.specs.benchmark_spec import DatasetSpec
from tests.arithmetic import sums, write_task
from tests.refused import refused


@pytest.mark.parametrize(
    ("dataset", "revision"),
    [
        (DatasetSpec(path="somebody/sums", revision="abc"), "abc"),
        (DatasetSpec(path="somebody/sums"), "its own"),
        (DatasetSpec(path="somebody/else", revision="abc"), "its own"),
    ],
)
def test_a_data_set_is_read_at_the_revision_of_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: DatasetSpec, revision: str
) -> None:
    calls: list[dict[str, Any]] = []

    def load_dataset(**how: Any) -> None:
        calls.append(how)
        raise ConnectionError("no network here")

    folder = write_task(tmp_path / "t", sums(1))
    lines = (folder / "sums.yaml").read_text().splitlines()
    hub = ["dataset_path: somebody/sums", "dataset_kwargs: {revision: its own}"]
    start = next(n for n, line in enumerate(lines) if line.startswith("dataset_path"))
    kept = [line for n, line in enumerate(lines) if n < start or not _of_data(lines, start, n)]
    (folder / "sums.yaml").write_text("\n".join([*kept, *hub]) + "\n")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert "no network here" in refused(load_tasks, "sums", folder, pinned=dataset.pinned)
    assert [how["revision"] for how in calls] == [revision]


def _of_data(lines: list[str], start: int, place: int) -> bool:
    """Whether a line belongs to `dataset_path` or `dataset_kwargs`."""
    head = next(lines[n] for n in range(place, -1, -1) if not lines[n].startswith(" "))
    return head.startswith(("dataset_path", "dataset_kwargs"))


def test_rows_are_prepared_in_this_process(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "t", sums(2))
    (folder / "many.py").write_text(
        "import os\n"
        "def process_docs(docs):\n"
        "    return docs.map(lambda doc: {'process': os.getpid()}, num_proc=2)\n"
    )
    text = (folder / "sums.yaml").read_text()
    (folder / "sums.yaml").write_text(f"{text}process_docs: !function many.process_docs\n")
    (task,) = load_tasks("sums", folder).tasks
    assert set(task.test_docs()["process"]) == {os.getpid()}
