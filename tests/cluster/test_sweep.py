"""The final output of a command with cells that run as jobs: rows, and one cause for each cell without a row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import run
from espalier.harness.evaluation.evaluate import SampleErrors
from espalier.harness.evaluation.samples import Failure
from espalier.harness.runs.cluster.job_file import JobFile, JobGroup, JobState
from tests.runs.helpers import Bench, make_bench

SWEEP = ("-m", "method=random,uniform,fastv", "ratio=0.5", "cluster=joblib", "cluster.poll=0.01")


class Here:
    """Runs jobs in this process, one after the other, as workers run them in separate processes."""

    def __init__(self, *settings: object) -> None:
        self.names: list[str] = []

    def check(self, packs: Sequence[JobGroup[Any]]) -> None: ...

    def start(self, packs: Sequence[JobGroup[Any]], files: Sequence[JobFile]) -> None:
        for number, file in enumerate(files):
            self.names.append(f"job-{number}")
            file.begin()
            try:
                code = run.main(["--cells", str(file.path)])
            except ZeroDivisionError:
                code = 1
            file.end(code)

    def states(self, names: Sequence[str]) -> Mapping[str, JobState] | None:
        return {name: JobState("ENDED") for name in names}

    def stop(self) -> str | None:
        return None


@pytest.fixture
def bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Bench:
    monkeypatch.setattr("espalier.harness.runs.cluster.cluster_sweep.LocalWorkers", Here)
    return make_bench(tmp_path / "store", capsys, monkeypatch)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (SampleErrors((Failure("t", 1, "OSError: broken"),), 3), "OSError: broken"),
        (ZeroDivisionError("nobody thought of it"), "ZeroDivisionError: nobody thought of it"),
    ],
)
def test_a_failed_cell_of_a_job_is_named_once_and_the_others_have_their_rows(
    bench: Bench, error: Exception, cause: str
) -> None:
    bench.fake.stop_after, bench.fake.error = 1, lambda: error
    done = bench(*SWEEP, "cluster.cells_per_job=3", "json=false")
    assert done.code == 1
    rows = [json.loads(path.read_bytes()) for path in bench.store.glob("runs/*/row.json")]
    assert sorted(row["method"] for row in rows) == ["fastv", "uniform"]
    # The job has printed before: only the lines after its own last line count.
    _, job, lines = done.out.rpartition('"method": "fastv"')
    assert job
    assert [lines.count(text) for text in (cause, "\nfailed: ", "run.py ")] == [1, 1, 1]
    again = lines.partition("run what failed again: ")[2].splitlines()[0]
    assert "method=random ratio=0.5" in again
    assert done.err.splitlines()[-1] == "error: 1 of 3 cells have no row"


def test_of_one_cell_the_cause_is_the_error(bench: Bench) -> None:
    bench.fake.stop_after, bench.fake.error = 1, lambda: ZeroDivisionError("nobody")
    done = bench("method=random", "ratio=0.5", *SWEEP[3:])
    assert (done.code, done.err.splitlines()[-1]) == (1, "error: ZeroDivisionError: nobody")
