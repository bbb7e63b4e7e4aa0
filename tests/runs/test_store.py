"""What run.py does to a store that has rows already: forced runs, damaged and foreign rows, two commands at once."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from espalier.harness.errors import StoreLost
from espalier.harness.paths import ROOT
from espalier.harness.store import RunDir, Store
from espalier.harness.store.files import durable
from tests.runs.helpers import Bench


def only_run(bench: Bench) -> RunDir:
    (path,) = bench.store.glob("runs/*")
    return RunDir(path)


@pytest.mark.slow
def test_a_forced_run_that_is_stopped_leaves_the_row_and_its_answers(bench: Bench) -> None:
    first = bench("method=fastv").last
    run = only_run(bench)
    journal = run.journal.path.read_bytes()
    bench.fake.stop_after = 2
    assert bench("method=fastv", "force=true").code == 130
    assert run.journal.path.read_bytes() == journal
    assert bench("method=fastv").last == first | {"status": "cached"}
    # The same command goes on from what it had.
    forced = bench("method=fastv", "force=true").last
    assert (forced["status"], forced["extra"]["resumed_samples"]) == ("resumed", 2)
    assert run.row() == forced
    assert len(run.journal) == 3
    assert len(run.forced) == 0
    # And once more it starts anew.
    assert bench("method=fastv", "force=true").last["extra"]["resumed_samples"] == 0


def test_force_starts_with_a_fresh_journal(bench: Bench) -> None:
    bench.fake.stop_after = 2
    bench("method=fastv")
    forced = bench("method=fastv", "force=true")
    assert forced.last["status"] == "done"
    assert forced.last["extra"]["resumed_samples"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("fails_at", ["journal.jsonl", "row.json"])
def test_a_forced_run_that_cannot_be_committed_loses_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    first = bench("method=fastv").last
    run = only_run(bench)
    plain = durable.replace

    def full(path: Path, content: bytes) -> None:
        if path.name == fails_at:
            raise StoreLost(f"store: {path} cannot be written: No space left on device")
        plain(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "replace", full)
        assert bench("method=fastv", "force=true").code == 1
    assert run.row() == first
    assert len(run.journal) == len(run.forced) == 3
    forced = bench("method=fastv", "force=true").last
    assert forced["extra"]["resumed_samples"] == 3
    assert run.row() == forced


def test_a_damaged_row_is_replaced_by_force_as_its_line_says(bench: Bench) -> None:
    bench("method=fastv")
    run = only_run(bench)
    (run.path / "row.json").write_text('{"schema": 1, ')
    line = bench.refusal("method=fastv")
    assert "is damaged" in line
    assert "valid: force=true" in line
    forced = bench.success("method=fastv", "force=true")
    assert run.row() == forced.last


@pytest.mark.sampled(18)
@pytest.mark.parametrize(
    ("block", "name", "value"),
    [
        ("tokens", "kept_final", "36"),
        ("flops", "share_of_full", []),
        ("time", "prefill_ms", {}),
        ("memory", "kv_bytes", "x"),
        ("metrics", "accuracy", None),
        ("extra", "failures", None),
    ],
)
def test_a_row_that_lacks_what_is_shown_is_refused_in_one_line(
    bench: Bench, block: str, name: str, value: object
) -> None:
    done = bench("method=fastv").last
    run = only_run(bench)
    for damaged in (
        {k: v for k, v in done[block].items() if k != name},
        done[block] | {name: value},
    ):
        if block == "metrics" and name not in damaged:
            damaged = {}
        (run.path / "row.json").write_text(json.dumps(done | {block: damaged}))
        assert f"is damaged ({block}" in bench.refusal("method=fastv")


def test_rows_of_other_runs_do_not_matter(bench: Bench) -> None:
    done = bench("method=fastv")
    key = done.last["run_key"]
    copied = Store(bench.store).run("0" * 16)
    shutil.copy(bench.store / "runs" / key / "row.json", copied.path / "row.json")
    future = Store(bench.store).run("f" * 16)
    (future.path / "row.json").write_text(json.dumps(done.last | {"schema": 99}))
    other = bench.success("method=none")
    assert other.last["status"] == "done"


def test_a_row_copied_from_another_run_is_not_served(bench: Bench) -> None:
    fastv, none = bench("method=fastv").last, bench("method=none").last
    runs = bench.store / "runs"
    shutil.copy(runs / fastv["run_key"] / "row.json", runs / none["run_key"] / "row.json")
    assert f"is the row of run '{fastv['run_key']}'" in bench.refusal("method=none")
    assert bench("method=none", "force=true").last["run_key"] == none["run_key"]


@pytest.mark.slow
def test_a_command_waits_for_another_that_computes_the_same_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench("method=fastv", f"store={bench.store / 'elsewhere'}").last
    run = Store(bench.store).run(made["run_key"])
    taken, leave, lines = threading.Event(), threading.Event(), []

    def other_command() -> None:
        with run.claim(patience=5) as held:
            assert held
            taken.set()
            assert leave.wait(60)
            run.commit(made)

    def tell(line: str) -> None:
        lines.append(line)
        leave.set()

    monkeypatch.setattr("espalier.harness.runs.single_run.tell_once", tell)
    other = threading.Thread(target=other_command)
    other.start()
    assert taken.wait(5)
    waited = bench("method=fastv")
    other.join()
    assert waited.last == made | {"status": "cached"}
    assert len(bench.fake.specs) == 1
    assert lines == [f"waiting: another command computes run {run.path}"]


def claimed_elsewhere(run: RunDir) -> str:
    """Return what another process prints that tries to hold a run."""
    program = (
        "import sys; from pathlib import Path; from espalier.harness.store import RunDir\n"
        "with RunDir(Path(sys.argv[1])).claim(0.1) as held: print(held)"
    )
    call = [sys.executable, "-c", program, str(run.path)]
    done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout.strip()


def test_a_run_is_held_by_one_process_at_a_time_and_given_back(run: RunDir) -> None:
    with run.claim(0) as held:
        assert held
        assert claimed_elsewhere(run) == "False"
    assert claimed_elsewhere(run) == "True"
    with run.claim(0) as again:
        assert again


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EROFS, errno.EIO])
def test_without_locks_every_command_may_compute_but_for_a_failing_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    error = OSError(number, os.strerror(number))
    monkeypatch.setattr("espalier.harness.store.claims.FileLock.acquire", Mock(side_effect=error))
    expected: Any = nullcontext()
    if number == errno.EIO:
        expected = pytest.raises(StoreLost, match="k1 cannot be claimed: Input/output error")
    with expected, Store(tmp_path).run("k1").claim(0) as held:
        assert held
