"""Jobs on the workers of a Dask or Ray cluster of this machine: `make test` for Dask, `make test-ray` for Ray."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import run
from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT
from espalier.harness.runs.cluster.job_file import JobGroup
from espalier.harness.runs.cluster.remote_workers import RemoteWorkers
from espalier.harness.runs.cluster.resources import ClusterSpec, Resources
from tests.cluster.test_estimate import planned

CELLS = (
    *("-m", "method=random,uniform", "ratio=0.5,0.9", "benchmark=seedling_caption"),
    *("engine.batch_size=1", "engine.paired=0", "json=true"),
)
JOBS = ("cluster=joblib", "cluster.poll=0.2", "cluster.cells_per_job=2", "cluster.cpus=1")

on_clusters = pytest.mark.parametrize("cluster", ["dask", "ray"], indirect=True)


def dask_address() -> Iterator[str]:
    """Start a scheduler with two workers; yield its address."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as workers:
        yield workers.scheduler_address


def ray_address() -> Iterator[str]:
    """Start a cluster of two nodes with a core each; yield its address."""
    pytest.importorskip("ray", reason="ray is not installed (make test-ray)")
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    yield nodes.address
    nodes.shutdown()


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[tuple[str, ...]]:
    """Yield the settings of a cluster with two workers, which knows nothing of this process."""
    addresses = {"dask": dask_address, "ray": ray_address}[request.param]()
    yield (*JOBS, f"cluster.backend={request.param}", f"cluster.address={next(addresses)}")
    next(addresses, None)


def jobs_of(store: Path) -> list[psutil.Process]:
    """Return the processes of jobs of a store, once one of them has answered a question."""
    end = time.monotonic() + 120
    while time.monotonic() < end and not any(
        path.stat().st_size for path in store.glob("runs/*/journal.jsonl")
    ):
        time.sleep(0.1)
    processes = psutil.process_iter(["cmdline"])
    return [
        process
        for process in processes
        if "--cells" in (words := process.info["cmdline"] or ()) and str(store) in " ".join(words)
    ]


def rows_of(store: Path) -> dict[str, Any]:
    """Return what a row states of answers, by key."""
    rows = [json.loads(path.read_bytes()) for path in store.glob("runs/*/row.json")]
    return {row["run_key"]: (row["metrics"], row["tokens"], row["n_samples"]) for row in rows}


@pytest.mark.slow
@on_clusters
def test_rows_are_those_of_one_process(
    cluster: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (*CELLS, "limit=2")
    assert run.main([*line, *cluster, f"store={tmp_path / 'jobs'}"]) == 0
    printed = capsys.readouterr().out
    assert "raylet" not in printed
    assert [json.loads(text)["method"] for text in printed.splitlines() if text[0] == "{"] == [
        *("random", "random", "uniform", "uniform")
    ]
    assert run.main([*line, f"store={tmp_path / 'local'}"]) == 0
    assert rows_of(tmp_path / "jobs") == rows_of(tmp_path / "local")
    assert len(rows_of(tmp_path / "jobs")) == 4


@pytest.mark.slow
@on_clusters
def test_a_job_goes_on_after_its_worker_was_killed(
    cluster: tuple[str, ...], tmp_path: Path
) -> None:
    killed: list[int] = []

    def kill() -> None:
        worker = jobs_of(tmp_path)[0].parent()
        assert worker is not None
        worker.kill()
        killed.append(worker.pid)

    thread = threading.Thread(target=kill)
    thread.start()
    one_job = (text.replace("per_job=2", "per_job=4") for text in cluster)
    assert run.main([*CELLS, "limit=30", *one_job, f"store={tmp_path}"]) == 0
    thread.join()
    assert killed
    assert [count for *_, count in rows_of(tmp_path).values()] == [30] * 4


@pytest.mark.slow
@on_clusters
def test_ctrl_c_ends_the_jobs(cluster: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "run.py", *CELLS, "limit=100", *cluster, f"store={tmp_path}"]
    # A shell ignores Ctrl-C in what it starts in the background, such as these tests.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    jobs = jobs_of(tmp_path)
    assert jobs
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    psutil.wait_procs(jobs, timeout=10)
    assert not any(job.is_running() for job in jobs)


def test_a_cluster_is_named_and_answers_or_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.delenv("DASK_SCHEDULER_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", nobody)

    def error(*settings: str) -> str:
        assert run.main([*CELLS, *JOBS, *settings, f"store={tmp_path}"]) == 2
        return capsys.readouterr().err

    assert error("cluster.backend=dask").startswith(
        "error: cluster.address=None: DASK_SCHEDULER_ADDRESS names no cluster"
    )
    begin = time.monotonic()
    for line in (
        error("cluster.backend=dask", f"cluster.address={nobody}"),
        error("cluster.backend=ray"),
    ):
        assert line.startswith(f"error: cluster.address={nobody}: no cluster of ")
        assert line.count("\n") == 1
    assert time.monotonic() - begin < 20
    assert "no cluster of ray answers" in error("cluster.backend=ray", "cluster.address=local")
    assert "did you mean dask?" in error("cluster.backend=dusk")


@pytest.mark.parametrize(
    ("backend", "package"), [("dask", "distributed"), ("ray", "ray")], ids=["dask", "ray"]
)
def test_a_missing_package_is_a_line_with_its_extra(
    backend: str,
    package: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"cluster.address=127.0.0.1:{listening.getsockname()[1]}"
        settings = (*JOBS, f"cluster.backend={backend}", address, f"store={tmp_path}")
        assert run.main([*CELLS, *settings]) == 2
    assert capsys.readouterr().err == (
        f"error: the package {package} is not installed; valid: pip install 'espalier-vlm[{backend}]'\n"
    )


def test_a_dry_run_names_the_backend() -> None:
    lines = planned(*CELLS[:4], *JOBS, "cluster.backend=ray")[1]
    assert (
        "jobs: 2 (cluster=joblib cluster.backend=ray, cluster.cells_per_job: at most 2 cells)"
        in lines
    )


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["ray"], indirect=True)
def test_jobs_that_do_not_fit_are_refused(
    cluster: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (text.replace("cpus=1", "cpus=2") for text in cluster)
    assert run.main([*CELLS, *settings, f"store={tmp_path}"]) == 2
    assert "its workers have room for 0 jobs of 2 CPUs and 0 GPUs" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [0, 1])
def test_workers_of_dask_do_not_share_gpus(gpus: int) -> None:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None, protocol="tcp"
    ) as pool:
        address = pool.scheduler_address
        workers = RemoteWorkers(ClusterSpec("joblib", backend="dask", address=address))
        job: JobGroup[object] = JobGroup("m", Resources(gpus, 1, 2**20), ())
        if gpus:
            with pytest.raises(UserError, match="2 jobs at once would share the GPUs"):
                workers.check([job])
        else:
            workers.check([job])
            with workers._client:
                assert workers._room == 2
