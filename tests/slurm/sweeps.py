"""Sweeps of the embedded model through a real SLURM: `make test-slurm`, not part of the everyday run.

A job is asked back into the queue, one is preempted, one loses its process, one runs into its time limit; the same
command then completes the sweep. What became of a cell is read off its row and journal, never off SLURM's state.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import run
from tests.slurm.box import Box, NotHere, install, running

#: Eight runs in four jobs.
CELLS = (
    *("-m", "method=random,uniform", "ratio=0.5,0.6,0.7,0.8", "benchmark=seedling_caption"),
    *("limit=20", "engine.batch_size=1", "engine.paired=0", "json=true"),
)
JOBS = ("cluster=slurm", "cluster.poll=1", "cluster.cpus=1", "cluster.cells_per_job=2")
GRID = (*CELLS, *JOBS)

#: SLURM makes a job that was queued again wait for two minutes; this long it has to be left alone.
REST = 3.0


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    try:
        install()
        with running(tmp_path_factory.mktemp("slurm")) as up, pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(up.conf))
            with hurried(up):
                yield up
    except NotHere as error:
        pytest.exit(f"no SLURM: {error}", returncode=1)


class hurried:
    """Lets jobs that were queued again start at once, as soon as SLURM allows it."""

    def __init__(self, box: Box) -> None:
        self._box, self._over = box, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        since: dict[str, float] = {}
        while not self._over.wait(1.0):
            waiting = {
                job
                for job, (state, why) in self._box.jobs().items()
                if (state, why) == ("PENDING", "BeginTime")
            }
            since = {job: since.get(job, time.monotonic()) for job in waiting}
            for job in [job for job, start in since.items() if time.monotonic() - start > REST]:
                self._box.ask(
                    "scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=240"
                )
                del since[job]


def until(what: str, there: Callable[[], Any], seconds: float = 240) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if result := there():
            return result
        time.sleep(0.2)
    raise AssertionError(f"no {what} after {seconds} s")


def jobs_of(store: Path) -> dict[str, Path]:
    """Return the file of each job that commands on this store have submitted."""
    return {
        name: about.parent / file
        for about in sorted(store.glob("cluster/*/sweep.json"))
        for name, file in json.loads(about.read_bytes())["jobs"].items()
    }


def answered(store: Path, file: Path) -> int:
    """Return how many samples of a job's cells are in their journals."""
    keys = [cell["key"] for cell in json.loads(file.read_bytes())]
    return sum(len(journal(store, key)) for key in keys)


def journal(store: Path, key: str) -> list[dict[str, Any]]:
    path = store / "runs" / key / "journal.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def answers(store: Path, key: str) -> list[tuple[str, int, str]]:
    """Return every answer in the journal of a run, so that one given twice stands there twice."""
    entries = (entry for entry in journal(store, key) if "answer" in entry)  # and not scores
    return sorted((entry["task"], entry["doc_id"], entry["answer"]) for entry in entries)


def rows(store: Path) -> dict[str, dict[str, Any]]:
    return {
        path.parent.name: json.loads(path.read_bytes()) for path in store.glob("runs/*/row.json")
    }


def logs_of(store: Path) -> str:
    """Return what submitit said in all jobs."""
    return "".join(
        path.read_text(errors="replace") for path in store.glob("cluster/*/slurm/**/*_log.*")
    )


def processes(box: Box, file: Path) -> list[int]:
    """Return the numbers of the processes that run the cells of a job."""
    return [
        pid for pid, words in box.processes() if words[-2:-1] == [str(file)] and "--cells" in words
    ]


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert run.main([*GRID, *argv]) == 2
    (line,) = [entry for entry in capsys.readouterr().err.splitlines() if entry]
    assert line.startswith("error: ")
    return line


def test_what_no_node_can_give_is_refused_before_anything_is_submitted(
    box: Box, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = f"store={tmp_path}"
    line = refused(capsys, store, "cluster.partition=gpus")
    assert "cluster.partition='gpus'" in line
    assert "valid: main, urgent" in line
    line = refused(capsys, store, "cluster.gpus=1", "model.device=cpu")
    assert "cluster.gpus=1 (model=seedling): no node of partition main gives as much" in line
    line = refused(capsys, store, "cluster.memory=9000GiB")
    assert "cluster.memory=9216000MiB" in line
    line = refused(capsys, store, "+cluster.options.reservation=nobodys")
    assert "sbatch refuses the job" in line
    assert "reservation" in line
    assert box.jobs() == {}


def restarts(box: Box, job: str) -> int:
    """Return how often a job went back to the queue."""
    (count,) = re.findall(r"Restarts=(\d+)", box.ask("scontrol", "show", "job", job))
    return int(count)


def test_a_sweep_survives_what_happens_to_jobs(
    box: Box, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    there = f"store={store}"
    with ThreadPoolExecutor(1) as beside:
        first = beside.submit(run.main, [*GRID, there])
        jobs = until("a submission", lambda: jobs_of(store))
        killed = disturb(box, store, jobs)
        assert first.result() == 1
    ended = capsys.readouterr()
    assert jobs_of(store) == jobs
    assert ended.out.count(f"the process of job {killed} was killed by SIGKILL") == 1
    assert ended.out.count("run what failed again: ") == 1
    before = rows(store)
    assert len(before) in (6, 7)
    assert f"error: {8 - len(before)} of 8 cells have no row" in ended.err

    # The same command completes the sweep, with one job more; given again, it waits for that one.
    assert run.main([*GRID, there, "cluster.wait=false"]) == 0
    assert len(jobs_of(store)) == len(jobs) + 1
    capsys.readouterr()
    assert run.main([*GRID, there]) == 0
    assert len(jobs_of(store)) == len(jobs) + 1
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    results = rows(store)
    assert {key: results[key] for key in before} == before
    assert sorted(json.loads(line)["run_key"] for line in printed) == sorted(results)

    # As if nothing had happened.
    plain = tmp_path / "plain"
    assert run.main([*CELLS, f"store={plain}"]) == 0
    expected = rows(plain)
    assert len(expected) == 8
    assert results.keys() == expected.keys()
    for key, row in results.items():
        assert row["metrics"] == expected[key]["metrics"]
        assert answers(store, key) == answers(plain, key)
    assert not [path for path in (store / "runs").rglob(".*") if path.is_file()]


def disturb(box: Box, store: Path, jobs: dict[str, Path]) -> str:
    """Do to the jobs of a sweep what happens on clusters; return the one that does not survive it."""
    back, killed, _, last = jobs
    # One is asked back into the queue in the middle of its cells.
    until("answers of the first job", lambda: answered(store, jobs[back]) > 3)
    box.ask("scontrol", "requeue", back)
    # One loses its process, as on a machine that runs out of memory.
    until("answers of the second job", lambda: answered(store, jobs[killed]) > 3)
    for pid in until("its process", lambda: processes(box, jobs[killed])):
        os.kill(pid, signal.SIGKILL)
    # Those that run then give way to somebody more important.
    until("answers of the last job", lambda: answered(store, jobs[last]) > 3)
    urgent = ("--partition=urgent", "--cpus-per-task=2", "--mem=1M", "--time=1")
    box.ask("sbatch", *urgent, "--output=/dev/null", "--wrap=sleep 2")
    until("a job that gave way", lambda: restarts(box, last) == 1)
    assert "this job is preempted" in logs_of(store)
    # The first one is back, hangs, and runs into its time limit.
    for pid in until("its process", lambda: processes(box, jobs[back])):
        os.kill(pid, signal.SIGSTOP)
    box.ask("scontrol", "update", f"JobId={back}", "TimeLimit=1")
    until("the end of its time", lambda: restarts(box, back) == 2)
    return killed
