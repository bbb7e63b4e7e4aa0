"""Jobs as processes: their files, devices, and the reasons for cells without a row. No model runs here."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import run
from espalier.harness.errors import UserError
from espalier.harness.runs.cluster import job_file
from espalier.harness.runs.cluster.cluster_sweep import Jobs, watch
from espalier.harness.runs.cluster.job_file import (
    JobCell,
    JobFile,
    JobGroup,
    JobState,
    LeftOut,
    run_job,
)
from espalier.harness.runs.cluster.launchers import GpuPool, LocalWorkers, Slurm
from espalier.harness.runs.cluster.resources import ClusterSpec, Resources
from espalier.harness.runs.streams import StatusLine

#: Stands for run.py: writes the row of each cell, and what it sees of devices; fails where a config says so.
WORKER = """
import json, os, signal, sys, time
for cell in json.load(open(sys.argv[1])):
    how = cell["config"].get("how")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "error":
        print("error: disk full", file=sys.stderr)
        sys.exit(1)
    if how == "hang":
        time.sleep(600)
    with open(cell["row"], "w") as row:
        json.dump({"devices": os.environ.get("CUDA_VISIBLE_DEVICES")}, row)
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    monkeypatch.setattr(job_file, "_command", lambda job: [sys.executable, str(path), str(job)])


def job(folder: Path, number: int, *hows: str) -> JobFile:
    file = JobFile(folder / f"job-{number:03}.json")
    file.write(
        [
            JobCell(f"{number}{place}", str(folder / f"row-{number}-{place}"), None, {"how": how})
            for place, how in enumerate(hows)
        ]
    )
    return file


def packs(gpus: int, count: int) -> list[JobGroup[object]]:
    return [JobGroup("m", Resources(gpus, 1, 2**20), ()) for _ in range(count)]


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    file = job(tmp_path, 0, "good", "good")
    first, second = file.entries()
    assert (first.key, first.before, first.config) == ("00", None, {"how": "good"})
    assert not first.done
    Path(first.row).write_text("{}", encoding="utf-8")
    assert first.done
    assert not second.done
    # A row that stood there before is not this job's.
    assert not JobCell("k", first.row, Path(first.row).stat().st_mtime_ns, {}).done
    assert file.ended() is None
    file.leave_out([LeftOut("01", "reason", 2)])
    assert file.left_out() == {"01": LeftOut("01", "reason", 2)}
    file.begin()
    assert file.left_out() == {}


def test_a_file_that_is_none_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text('[{"key": ')
    for name in ("torn.json", "absent.json"):
        with pytest.raises(UserError, match="is not a file of a job"):
            JobFile(tmp_path / name).entries()


def test_a_job_without_cells_to_do_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = job(tmp_path, 0, "good")
    Path(file.entries()[0].row).write_text("{}", encoding="utf-8")
    monkeypatch.setattr(job_file, "start", lambda *_: pytest.fail("a process was started"))
    assert (run_job(file, {}), file.ended()) == (0, 0)


@pytest.mark.usefixtures("worker")
def test_a_job_notes_how_its_process_ended(tmp_path: Path) -> None:
    for number, (how, code) in enumerate([("good", 0), ("error", 1), ("kill", -signal.SIGKILL)]):
        file = job(tmp_path, number, how)
        assert (run_job(file, {}), file.ended()) == (code, code)


@pytest.mark.usefixtures("worker")
def test_a_job_that_is_told_to_stop_ends_its_process(tmp_path: Path) -> None:
    assert run_job(job(tmp_path, 0, "hang"), {}, stop=lambda: True) == -signal.SIGTERM


def test_devices_are_never_handed_out_twice() -> None:
    pool, held, clashes = GpuPool("0123"), set[str](), list[str]()
    lock = threading.Lock()

    def use(count: int) -> None:
        for _ in range(50):
            with pool.take(count) as taken:
                with lock:
                    clashes.extend(held & set(taken))
                    held.update(taken)
                    assert len(taken) == count
                with lock:
                    held.difference_update(taken)

    threads = [threading.Thread(target=use, args=(count,)) for count in (1, 2, 3, 1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    with pool.take(4) as taken:
        assert sorted(taken) == list("0123")


@pytest.mark.usefixtures("worker")
def test_each_job_sees_gpus_of_its_own_and_all_are_told_apart(tmp_path: Path) -> None:
    workers = LocalWorkers(ClusterSpec("joblib"), ("4", "5", "7"))
    files = [
        job(tmp_path, number, "good", "error" if number == 1 else "good") for number in range(3)
    ]
    workers.start(packs(1, 3), files)
    jobs = Jobs(dict(zip(workers.names, files, strict=True)))
    watch(jobs, workers, 0.1, StatusLine(quiet=True), lambda line: None)
    devices = {json.loads(Path(file.entries()[0].row).read_bytes())["devices"] for file in files}
    assert devices <= {"4", "5", "7"}
    assert jobs.missing("00") is None
    assert jobs.missing("11") == LeftOut("11", "job job-001: disk full", 1)


def test_workers_are_as_many_as_there_is_room_for() -> None:
    for workers, jobs, at_once in ((None, 9, 4), (None, 3, 3), (2, 9, 2)):
        cluster = (
            ClusterSpec("joblib") if workers is None else ClusterSpec("joblib", workers=workers)
        )
        assert LocalWorkers(cluster, tuple("01234567")).at_once(packs(2, jobs)) == at_once
    with pytest.raises(UserError, match=r"cluster\.gpus=3 \(model=m\): this machine has 2 GPUs"):
        LocalWorkers(ClusterSpec("joblib"), ("0", "1")).check(packs(3, 1))
    with pytest.raises(UserError, match=r"cluster\.wait=False"):
        ClusterSpec("joblib", wait=False)


class Queue:
    """Tells one state after another of a single job."""

    def __init__(self, *states: str | None) -> None:
        self.names = ["7"]
        self._states = list(states)
        self.stopped = False

    def check(self, packs: Sequence[JobGroup[object]]) -> None: ...

    def start(self, packs: Sequence[JobGroup[object]], files: Sequence[JobFile]) -> None: ...

    def states(self, names: Sequence[str]) -> Mapping[str, JobState] | None:
        state = self._states.pop(0)
        if state == "Ctrl-C":
            raise KeyboardInterrupt
        return None if state is None else {"7": JobState(state, "None")}

    def stop(self) -> str:
        return "jobs 7 go on"


def reason_of(jobs: Jobs, key: str) -> str:
    """Return why a cell has no row."""
    lost = jobs.missing(key)
    assert lost is not None
    return lost.reason


def test_a_job_between_two_turns_in_the_queue_is_waited_for(tmp_path: Path) -> None:
    queue = Queue("RUNNING", None, "COMPLETED", "PENDING", "RUNNING", "FAILED", "FAILED")
    jobs = Jobs({"7": job(tmp_path, 0, "good", "good")})
    watch(jobs, queue, 0.001, StatusLine(quiet=True), lambda line: None)
    assert queue._states == []
    assert reason_of(jobs, "00").startswith("job 7 ended before this cell was done: FAILED; ")
    # A row counts, whatever the queue says; a reason that was noted does, too.
    Path(jobs.entries["7"][0].row).write_text("{}", encoding="utf-8")
    assert jobs.missing("00") is None
    jobs.files["7"].leave_out([LeftOut("01", "cannot be reached", 2)])
    assert jobs.missing("01") == LeftOut("01", "cannot be reached", 2)
    jobs.files["7"].begin()
    jobs.files["7"].end(-9)
    assert "was killed by SIGKILL" in reason_of(jobs, "01")


def test_a_line_reminds_who_stops_waiting_that_jobs_go_on(tmp_path: Path) -> None:
    lines: list[str] = []
    jobs = Jobs({"7": job(tmp_path, 0, "good")})
    with pytest.raises(KeyboardInterrupt):
        watch(jobs, Queue("RUNNING", "Ctrl-C"), 0.001, StatusLine(quiet=True), lines.append)
    assert lines[-1] == "jobs 7 go on"


def test_sbatch_gets_the_resources_of_the_job(tmp_path: Path) -> None:
    cluster = ClusterSpec("slurm", array_parallelism=3, grace=90, options={"qos": "long"})
    slurm = Slurm(cluster, tmp_path)
    large = slurm.parameters(JobGroup("m", Resources(4, 16, 2**38, 60, "big"), ()))
    expected = {
        **{"gpus_per_node": 4, "mem": "262144M", "time": 60, "signal_delay_s": 90},
        **{"partition": "big", "array_parallelism": 3},
        "additional_parameters": {"requeue": True, "qos": "long"},
    }
    assert {name: large[name] for name in expected} == expected
    small = slurm.parameters(JobGroup("m", Resources(0, 2, 2**30, 1), ()))
    assert not {"gpus_per_node", "partition"} & small.keys()
    assert small["signal_delay_s"] == 30


@pytest.mark.parametrize(
    "content",
    [
        '[{"key": "a", "row": "b", "before": null, "config": null}]',
        '[{"key": "a", "row": 3, "before": null, "config": {}}]',
        '[{"key": "a", "row": "b", "before": "x", "config": {}}]',
        '[{"key": "a", "row": "b", "before": null, "config": {}}]',
        '[{"key": "a", "row": "b", "before": null, "config": {"model": 3}}]',
        "[" * 100_000,
        "[3]",
        "3",
        "null",
        "{}" * 2,
        "\udcff",
    ],
)
def test_cells_of_nonsense_are_one_line(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.json"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert run.main(["--cells", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


@pytest.mark.parametrize("content", ["null", "[1]", "[" * 100_000, '{"code": "x"}', "", "3"])
def test_what_is_noted_of_a_job_and_makes_no_sense_is_passed_over(
    content: str, tmp_path: Path
) -> None:
    file = JobFile(tmp_path / "job-0.json")
    for part in (".left_out", ".end"):
        file.path.with_suffix(f"{part}.json").write_text(content)
    assert (file.left_out(), file.ended()) == ({}, None)
