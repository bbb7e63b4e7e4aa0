"""Several processes under torchrun share the samples of a run and give the row that one process gives."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.errors import UserError
from espalier.harness.evaluation.samples import Failure, SampleErrors
from espalier.harness.paths import ROOT
from espalier.harness.ranks import Ranks, _portable, is_main_process, join, without_launcher
from espalier.harness.store import Journal, RunDir, Store
from run import main
from tests.runs.helpers import Bench, Outcome

COMMON = ["model.device=cpu", "benchmark=seedling_rec", "limit=24", "engine.batch_size=4"]
COMMON += ["method=random", "engine.paired=4"]
#: The ratio of a run from its start, of one that goes on, and of one with a sample that fails.
WHOLE, HALF, FAILING = 0.5, 0.625, 0.25


def launch(script: Path, *arguments: str) -> Outcome:
    """Run a script in two processes under torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(script), *arguments, "json=true"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=600,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def first_of_two(script: Path, *arguments: str) -> tuple[int, str]:
    """Run a script in two processes without torchrun, which would end one with the other; end both with the first.

    Returns:
        The first one's exit status and what it wrote to stderr.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, **place, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**environment, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        _, complaint = both[0].communicate(timeout=300)
    finally:
        for process in both:
            process.kill()
            process.communicate()
    return both[0].returncode, complaint


def run_here(*arguments: str) -> Outcome:
    """Run run.py in this process alone, where its libraries are imported already."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([*arguments, "json=true"])
    return Outcome(code, out.getvalue(), err.getvalue())


def spoilt(folder: Path, body: str) -> Path:
    """Write run.py with another `generate`: `body` runs before the real one and sees rank, session, names and calls."""
    script = folder / "spoilt.py"
    script.write_text(
        "import os, signal, sys\n"
        "import run\n"
        "from espalier.harness.engine.session import Session\n"
        "plain, calls, rank = Session.generate, [], int(os.environ.get('RANK', '0'))\n"
        "def generate(session, inputs, names, **more):\n"
        "    calls.append(names)\n"
        f"    {body}\n"
        "    return plain(session, inputs, names, **more)\n"
        "Session.generate = generate\n"
        "sys.exit(run.main())\n"
    )
    return script


#: What the clock, the memory counter and the number of processes change in a row.
CHANGING = frozenset(
    [
        *(
            "status",
            "time",
            "peak_bytes",
            "time_iqr",
            "samples_per_second",
            "reading_ms",
            "speedup",
        ),
        *("resumed_samples", "peak_note", "processes"),
    ]
)


def lasting(value: Any) -> Any:
    """Return a row without the entries of CHANGING."""
    if not isinstance(value, dict):
        return value
    return {name: lasting(entry) for name, entry in value.items() if name not in CHANGING}


def stored_answers(run: RunDir) -> dict[int, str]:
    entries = [entry for entry in run.journal.entries() if "answer" in entry]
    assert len({entry["doc_id"] for entry in entries}) == len(entries)  # nothing is asked twice
    return {
        entry["doc_id"]: entry["answer"] for entry in sorted(entries, key=lambda e: e["doc_id"])
    }


@dataclass
class Ran:
    """A command that has run, and the store that it wrote to."""

    store: Store
    done: Outcome

    def row(self, ratio: float) -> dict[str, Any]:
        """The only row of a ratio."""
        (row,) = [row for row in self.done.rows if row["ratio"] == ratio]
        return row

    def answers(self, ratio: float) -> dict[int, str]:
        return stored_answers(self.store.run(self.row(ratio)["run_key"]))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One process, from start to end."""
    store = tmp_path_factory.mktemp("one")
    done = run_here(f"store={store}", *COMMON, "-m", f"ratio={WHOLE},{HALF}")
    assert done.code == 0, done.err
    return Ran(Store(store), done)


@pytest.fixture(scope="module")
def pair(alone: Ran, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Two processes and all that one launch of them can show, since starting them takes longest."""
    folder = tmp_path_factory.mktemp("two")
    # One run has answers already. Its second batch is half written.
    begun = Store(folder).run(alone.row(HALF)["run_key"])
    whole = (alone.store.run(alone.row(HALF)["run_key"]).path / "journal.jsonl").read_bytes()
    (begun.path / "journal.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:6]))
    # Another has a sample that fails, in the second batch of the second process.
    fails = f"session.budget.ratio == {FAILING} and 'seedling_rec/13' in names"
    script = spoilt(folder, f"assert not ({fails}), 'broken image'")
    # The last cell is the one before it again.
    ratios = f"ratio={FAILING},{WHOLE},{HALF},0.75,0.75"
    return Ran(Store(folder), launch(script, f"store={folder}", *COMMON, "-m", ratios))


@pytest.mark.slow
def test_two_processes_give_the_row_of_one(alone: Ran, pair: Ran) -> None:
    row = pair.row(WHOLE)
    assert lasting(row) == lasting(alone.row(WHOLE))
    assert row["status"] == "done"
    assert row["extra"]["environment"]["processes"] == 2
    assert row["extra"]["peak_note"].endswith("the largest of 2 processes")
    assert pair.answers(WHOLE) == alone.answers(WHOLE)
    stored = pair.store.run(row["run_key"])
    assert stored.row() == row
    # Six batches of four, dealt out by their numbers.
    other = [json.loads(line) for line in (stored.path / "journal.rank1.jsonl").open()]
    assert [entry["doc_id"] // 4 for entry in other] == [1] * 4 + [3] * 4 + [5] * 4


@pytest.mark.slow
def test_two_processes_go_on_where_one_was_stopped(alone: Ran, pair: Ran) -> None:
    row = pair.row(HALF)
    assert row["status"] == "resumed"
    assert row["extra"]["resumed_samples"] == 6
    assert lasting(row) == lasting(alone.row(HALF))
    assert pair.answers(HALF) == alone.answers(HALF)


@pytest.mark.slow
def test_a_sample_that_fails_in_one_process_is_named_once_and_the_sweep_goes_on(pair: Ran) -> None:
    assert pair.done.code == 1
    (error,) = [line for line in pair.done.err.splitlines() if line.startswith("error: ")]
    assert "1 of 24 samples failed: seedling_rec/13: AssertionError: broken image" in error
    # Rank 0 finds the row of the last cell, for both.
    assert [(row["ratio"], row["status"], row["n_samples"]) for row in pair.done.rows] == [
        (WHOLE, "done", 24),
        (HALF, "resumed", 24),
        (0.75, "done", 24),
        (0.75, "cached", 24),
    ]
    assert pair.done.out.count("headline metric") == 1  # the table as well is printed once
    runs = [path.parent for path in pair.store.root.glob("runs/*/journal.jsonl")]
    (failed,) = [path for path in runs if not (path / "row.json").exists()]
    assert len(stored_answers(pair.store.run(failed.name))) == 23


@pytest.mark.slow
def test_a_killed_process_ends_the_run_and_one_goes_on_from_it(alone: Ran, tmp_path: Path) -> None:
    # The first call is the warm-up, so two batches are answered and one is lost.
    kill = "rank == 1 and len(calls) == 4 and os.kill(os.getpid(), signal.SIGKILL)"
    command = [f"store={tmp_path}", *COMMON, f"ratio={WHOLE}"]
    done = launch(spoilt(tmp_path, kill), *command)
    assert (done.code, done.out) == (1, "")
    assert Store(tmp_path).rows() == []
    run = Store(tmp_path).run(alone.row(WHOLE)["run_key"])
    before = stored_answers(run)
    assert 8 <= len(before) <= 20
    resumed = run_here(*command)
    assert resumed.code == 0, resumed.err
    (row,) = resumed.rows
    assert resumed.out.count("acc_at_50 ") == 1  # the sheet
    assert row["status"] == "resumed"
    assert row["extra"]["resumed_samples"] == len(before)
    assert lasting(row) == lasting(alone.row(WHOLE))
    assert stored_answers(run) == alone.answers(WHOLE)


def test_a_journal_is_the_files_of_all_processes(journal: Journal, tmp_path: Path) -> None:
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


AGREE = """
import json, sys
from espalier.harness.errors import UserError
from espalier.harness.ranks import join

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
    ranks.gather("both are done")
"""


@pytest.mark.slow
def test_what_one_raises_all_raise_and_the_next_step_still_agrees(tmp_path: Path) -> None:
    script = tmp_path / "agree.py"
    script.write_text(AGREE)
    code, complaint = first_of_two(script, str(tmp_path))
    assert code == 0, complaint
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
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    line = bench.refusal("method=none")
    for word in ("WORLD_SIZE=2", "LOCAL_RANK, MASTER_ADDR, MASTER_PORT", "torchrun"):
        assert word in line


#: Variables of the second of two processes.
LAUNCH = {
    **{"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
}


def launched(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    """Set the variables of LAUNCH, some of them otherwise."""
    for name, value in {**LAUNCH, **changes}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "x"),
        ("RANK", "2"),
        ("LOCAL_RANK", "-1"),
        ("MASTER_PORT", "70000"),
        ("WORLD_SIZE", "0"),
    ],
)
def test_a_launch_that_makes_no_sense_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    launched(monkeypatch, **{"RANK": "0", "LOCAL_RANK": "0", name: value})
    assert main(["method=none"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{name}={value}" in line
    assert "torchrun" in line


def test_one_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with join() as ranks:
        assert ranks == Ranks()
        assert ranks.each(lambda: ranks.gather(ranks.first(lambda: 3))) == [3]
    with pytest.raises(KeyError):
        ranks.each(lambda: {}["missing"])


def test_libraries_do_not_see_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch)
    assert not is_main_process()
    before = dict(os.environ)
    with without_launcher():
        assert LAUNCH.keys().isdisjoint(os.environ)
    assert before == os.environ
    monkeypatch.setenv("RANK", "0")
    assert is_main_process()


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
import datetime, os, sys, time
import espalier.harness.ranks
from espalier.harness.ranks import join

espalier.harness.ranks.TIMEOUT = datetime.timedelta(seconds=20)

def meet():
    ranks.gather(0)
    if ranks.rank == 1:
        time.sleep(float(sys.argv[1]))
        os._exit(9)
    ranks.gather(1)

with join() as ranks:
    ranks.each(meet)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("seconds", "how"), [(0, "dies"), (1800, "hangs")])
def test_no_process_waits_for_one_that(tmp_path: Path, seconds: int, how: str) -> None:
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    code, complaint = first_of_two(script, str(seconds))
    assert code == 1
    assert "RankLost: another process of this run ended or does not answer" in complaint


THREADS = """
import os, sys
sys.path.insert(0, sys.argv[1])
import run

code = run.main(sys.argv[2:])
tasks = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
left = [name for name in tasks if "gloo" in name]
# At once: two processes write there.
os.write(2, f"left: {code} {left}\\n".encode())
"""


@pytest.mark.exhaustive
def test_no_thread_of_the_group_is_left_when_the_processes_part(tmp_path: Path) -> None:
    # One that lets go of its last tensor while Python ends aborts the process with SIGABRT, now and then.
    script = tmp_path / "threads.py"
    script.write_text(THREADS)
    command = [f"store={tmp_path / 'store'}", "model.device=cpu", "limit=2", "engine.paired=0"]
    done = launch(script, str(ROOT), *command)
    assert done.err.count("left: 0 []") == 2, done.err


@pytest.mark.exhaustive
def test_two_processes_that_share_a_pass_give_the_rows_of_one_cell_by_cell(tmp_path: Path) -> None:
    command = ["-m", "model.device=cpu", "limit=10", "engine.batch_size=2", "engine.paired=0"]
    command += ["method=divprune,fastv", "ratio=0.5"]
    plain = run_here(f"store={tmp_path / 'plain'}", *command)
    assert plain.code == 0, plain.err
    command += ["engine.share=prefix"]
    shared = launch(ROOT / "run.py", f"store={tmp_path / 'shared'}", *command)
    assert shared.code == 0, shared.err
    stores = [Store(tmp_path / name) for name in ("plain", "shared")]
    for row in stores[0].rows():
        key = row["run_key"]
        other = stores[1].run(key).row()
        assert other["extra"].pop("one_pass")["samples"] == 10
        assert lasting(other) == lasting(row)
        assert stored_answers(stores[1].run(key)) == stored_answers(stores[0].run(key))
