"""Several processes under torchrun share the samples of a run and give the row that one process gives."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.config.spec import ROOT
from harness.errors import UserError
from harness.evaluation.samples import Failure, SampleErrors
from harness.ranks import Ranks, _portable, alone, join, speaks
from harness.store import Journal, Store
from tests.run_helpers import make_bench

RUN = ["model.device=cpu", "benchmark=seedling_rec", "limit=24", "engine.batch_size=4"]
RANDOM = [*RUN, "method=random", "ratio=0.5"]


@dataclass
class Launched:
    """A finished command; of torchrun's own report on stderr nothing is read."""

    code: int
    out: str
    err: str

    @property
    def row(self) -> dict[str, Any]:
        return dict(json.loads(self.out.splitlines()[-1]))

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def launch(processes: int, script: Path, *arguments: str) -> Launched:
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=240,
        check=False,
    )
    return Launched(done.returncode, done.stdout, done.stderr)


def evaluate(processes: int, store: Path, *arguments: str) -> Launched:
    return launch(processes, ROOT / "run.py", f"store={store}", *arguments)


def spoilt(folder: Path, body: str) -> Path:
    """Write run.py with another `generate`: `body` runs before the real one and sees rank, session, names and calls."""
    script = folder / "spoilt.py"
    script.write_text(
        "import os, signal, sys\n"
        "import run\n"
        "from harness.engine.session import Session\n"
        "plain, calls, rank = Session.generate, [], int(os.environ.get('RANK', '0'))\n"
        "def generate(session, inputs, names, **more):\n"
        "    calls.append(names)\n"
        f"    {body}\n"
        "    return plain(session, inputs, names, **more)\n"
        "Session.generate = generate\n"
        "sys.exit(run.main())\n"
    )
    return script


def lasting(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without what the clock, the memory counter and the number of processes say."""
    extra = {
        name: value
        for name, value in row["extra"].items()
        if name
        not in ("time_iqr", "samples_per_second", "resumed_samples", "peak_note", "environment")
    }
    environment = {k: v for k, v in row["extra"]["environment"].items() if k != "processes"}
    kept = {k: v for k, v in row.items() if k not in ("status", "time", "memory")}
    kv_bytes = row["memory"]["kv_bytes"]
    return {**kept, "extra": extra, "environment": environment, "kv_bytes": kv_bytes}


def answers(store: Path) -> dict[int, str]:
    (path,) = store.glob("runs/*/journal.jsonl")
    entries = [entry for entry in Journal(path).entries() if "answer" in entry]
    assert len({entry["doc_id"] for entry in entries}) == len(entries)  # nothing is asked twice
    return {
        entry["doc_id"]: entry["answer"] for entry in sorted(entries, key=lambda e: e["doc_id"])
    }


@dataclass
class Reference:
    store: Path
    row: dict[str, Any]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    store = tmp_path_factory.mktemp("one")
    done = evaluate(1, store, *RANDOM)
    assert done.code == 0, done.err
    return Reference(store, done.row)


def test_two_processes_give_the_row_of_one(one: Reference, tmp_path: Path) -> None:
    done = evaluate(2, tmp_path, *RANDOM)
    assert done.code == 0, done.err
    assert len([line for line in done.out.splitlines() if line.startswith("{")]) == 1
    assert done.out.count("acc_at_50 ") == 1  # the sheet as well is printed once
    assert lasting(done.row) == lasting(one.row)
    assert done.row["status"] == "done"
    assert done.row["extra"]["environment"]["processes"] == 2
    assert done.row["extra"]["peak_note"].endswith("the largest of 2 processes")
    assert answers(tmp_path) == answers(one.store)
    stored = Store(tmp_path).run(done.row["run_key"])
    assert stored.row() == done.row
    # Six batches of four, dealt out by their numbers.
    other = [json.loads(line) for line in (stored.path / "journal.rank1.jsonl").open()]
    assert [entry["doc_id"] // 4 for entry in other] == [1] * 4 + [3] * 4 + [5] * 4


def test_a_killed_process_ends_the_run_and_one_goes_on_from_it(
    one: Reference, tmp_path: Path
) -> None:
    # The first call is the warm-up, so two batches are answered and one is lost.
    kill = "rank == 1 and len(calls) == 4 and os.kill(os.getpid(), signal.SIGKILL)"
    done = launch(2, spoilt(tmp_path, kill), f"store={tmp_path}", *RANDOM)
    assert done.code == 1
    assert done.out == ""
    assert Store(tmp_path).rows() == []
    before = answers(tmp_path)
    assert 8 <= len(before) <= 20
    resumed = evaluate(1, tmp_path, *RANDOM)
    assert resumed.code == 0, resumed.err
    assert resumed.row["status"] == "resumed"
    assert resumed.row["extra"]["resumed_samples"] == len(before)
    assert lasting(resumed.row) == lasting(one.row)
    assert answers(tmp_path) == answers(one.store)


def test_two_processes_go_on_where_one_was_stopped(one: Reference, tmp_path: Path) -> None:
    stored = Store(tmp_path).run(one.row["run_key"])
    # The second batch is half written.
    whole = (one.store / "runs" / one.row["run_key"] / "journal.jsonl").read_bytes()
    (stored.path / "journal.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:6]))
    done = evaluate(2, tmp_path, *RANDOM)
    assert done.code == 0, done.err
    assert done.row["extra"]["resumed_samples"] == 6
    assert lasting(done.row) == lasting(one.row)
    assert answers(tmp_path) == answers(one.store)


def test_a_journal_is_the_files_of_all_processes(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    other = journal.of_rank(11)
    other.append({"doc_id": 3}, {"doc_id": 4})
    assert journal.entries() == other.entries() == [{"doc_id": 3}, {"doc_id": 4}]
    journal.append({"doc_id": 1})
    other.path.with_name("journal.rank2.jsonl").write_text('{"doc_id": 2}\n{"doc_id": 5, "tor')
    journal.of_rank(2).append({"doc_id": 6})
    assert sorted(entry["doc_id"] for entry in journal.entries()) == [1, 2, 3, 4, 6]
    assert len(journal) == 5
    journal.clear()
    assert list(tmp_path.iterdir()) == []


def test_a_sample_that_fails_in_one_process_is_named_once_and_the_sweep_goes_on(
    tmp_path: Path,
) -> None:
    fail = "assert session.budget.ratio != 0.5 or 'seedling_rec/5' not in names, 'broken image'"
    sweep = ["-m", "method=random", "ratio=0.5,0.75,0.75", "limit=12", "engine.warmup=0"]
    done = launch(2, spoilt(tmp_path, fail), f"store={tmp_path}", *RUN, *sweep)
    assert done.code == 1
    (error,) = done.errors
    assert "1 of 12 samples failed: seedling_rec/5: AssertionError: broken image" in error
    rows = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    # The last cell is the one before it again: rank 0 finds its row, for both.
    assert [(row["ratio"], row["status"]) for row in rows] == [(0.75, "done"), (0.75, "cached")]
    assert rows[0]["n_samples"] == 12
    (failed,) = [path for path in tmp_path.glob("runs/*") if not (path / "row.json").exists()]
    saved = [entry for entry in Journal(failed / "journal.jsonl").entries() if "answer" in entry]
    assert len(saved) == 11


AGREE = """
import json, sys
from harness.errors import UserError
from harness.ranks import join

def fail_here(kind, *where):
    if ranks.rank in where:
        raise kind(f"rank {ranks.rank}")
    return ranks.first(lambda: "from rank 0")

def outcome(function):
    try:
        return ranks.each(function)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

class Local(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")

def fail_oddly():
    if ranks.rank == 1:
        raise Local("not", "portable")
    return ranks.gather(1)

seen = []
with join() as ranks:
    seen.append(ranks.each(lambda: ranks.gather(ranks.rank * 10)))
    seen.append(outcome(lambda: fail_here(UserError, 1)))   # rank 0 waits in `first`
    seen.append(outcome(lambda: fail_here(UserError, 0)))   # before it is reached
    seen.append(outcome(lambda: fail_here(ValueError, 0, 1)))
    seen.append(outcome(fail_oddly))
    seen.append(ranks.each(lambda: ranks.share(list(range(5)))))
    seen.append(ranks.in_turn(lambda: ranks.rank))
    with open(f"{sys.argv[1]}/{ranks.rank}.json", "w") as file:
        json.dump(seen, file)
"""


def test_what_one_raises_all_raise_and_the_next_step_still_agrees(tmp_path: Path) -> None:
    script = tmp_path / "agree.py"
    script.write_text(AGREE)
    done = launch(2, script, str(tmp_path))
    assert done.code == 0, done.err
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first[0] == second[0] == [0, 10]
    assert first[1] == second[1] == "UserError: rank 1"
    assert first[2] == second[2] == "UserError: rank 0"
    assert (first[3], second[3]) == ("ValueError: rank 0", "ValueError: rank 1")
    assert first[4] == "RuntimeError: process 1: Local: not portable"
    assert second[4] == "Local: not portable"
    assert (first[5], second[5]) == ([0, 2, 4], [1, 3])
    assert (first[6], second[6]) == (0, 1)


def test_an_error_is_the_same_after_its_way_to_another_process() -> None:
    error = SampleErrors([Failure("t", 1, "OSError: no")], 4)
    assert _portable(error, 1) is error
    assert str(_portable(KeyError("x"), 1)) == "'x'"


def test_world_size_without_a_meeting_place_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(tmp_path / "store", capsys, monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    done = bench("method=none")
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    for word in ("WORLD_SIZE=2", "LOCAL_RANK, MASTER_ADDR, MASTER_PORT", "torchrun"):
        assert word in line
    assert bench.fake.loads == 0


def test_one_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with join() as ranks:
        assert ranks == Ranks()
        assert ranks.each(lambda: ranks.gather(ranks.first(lambda: 3))) == [3]
    with pytest.raises(KeyError):
        ranks.each(lambda: {}["missing"])


def test_libraries_do_not_see_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {
        "WORLD_SIZE": "2",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert not speaks()
    with alone():
        assert launched.keys().isdisjoint(os.environ)
    assert launched.items() <= os.environ.items()
    monkeypatch.setenv("RANK", "0")
    assert speaks()


def test_each_process_needs_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    Ranks(rank=1, world=4, local_rank=1, local_world=4).use_device("cuda")
    Ranks(rank=1, world=4, local_rank=1, local_world=4).use_device("cpu")
    Ranks().use_device("cuda")
    assert chosen == [1]
    with pytest.raises(UserError, match=r"4 processes .* 2 CUDA devices; valid: .*per_node 2"):
        Ranks(rank=3, world=4, local_rank=3, local_world=4).use_device("cuda")


LOST = """
import datetime, json, os, sys, time
import harness.ranks
from harness.ranks import join

os.environ |= {"RANK": sys.argv[1], "LOCAL_RANK": sys.argv[1]}
harness.ranks.TIMEOUT = datetime.timedelta(seconds=5)

def meet():
    ranks.gather(0)
    if ranks.rank == 1:
        time.sleep(float(sys.argv[2]))
        os._exit(9)
    ranks.gather(1)

with join() as ranks:
    ranks.each(meet)
"""


@pytest.mark.parametrize(("seconds", "how"), [(0, "dies"), (60, "hangs")])
def test_no_process_waits_for_one_that(tmp_path: Path, seconds: int, how: str) -> None:
    # Without torchrun, which would end the others itself.
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, **place, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(
            [sys.executable, str(script), rank, str(seconds)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        _, complaint = both[0].communicate(timeout=50)
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert both[0].returncode == 1
    assert "RankLost: another process of this run ended or does not answer" in complaint
