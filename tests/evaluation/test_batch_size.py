"""engine.batch_size=auto: the search, the memory it reads, the size it remembers, and one real lack of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.harness.cost.memory import DeviceMemory, free_memory
from espalier.harness.engine.record import GeneratedBatch
from espalier.harness.errors import UserError
from espalier.harness.evaluation.batch_answers import SHARE, largest_batch, ran_out
from espalier.harness.evaluation.evaluate import evaluate_session
from espalier.harness.paths import ROOT
from espalier.harness.ranks import Ranks
from espalier.harness.runs.admission import admit
from espalier.harness.store import Journal
from espalier.harness.store.files.digests import Digests
from tests import commands
from tests.arithmetic import Calculator, make_spec, sums, write_task
from tests.evaluation.test_evaluate import answers


@dataclass
class Scripted:
    """A trial on a machine with `memory` bytes, where a sample takes `each` and the model `model`."""

    memory: int
    each: int
    model: int = 100
    limit: int = 10**9
    tried: list[int] = field(default_factory=list)

    def largest(self, cap: int) -> int:
        return largest_batch(self.peak, self.model, lambda: self.memory, cap)

    def peak(self, size: int) -> int | None:
        self.tried.append(size)
        fits = size <= self.limit and self.model + size * self.each <= self.memory
        return self.model + size * self.each if fits else None


@pytest.mark.parametrize("memory", range(100, 2000, 37))
def test_the_search_stops_before_memory_does(memory: int) -> None:
    trial = Scripted(memory=memory, each=10)
    sizes = [n for n in (1, 2, 4, 8, 16, 32, 64) if n == 1 or 100 + n * 10 <= SHARE * memory]
    assert trial.largest(64) == max(sizes)
    # The extrapolation is exact here, so nothing is started that would not fit, but for the first.
    assert trial.tried == sizes


@pytest.mark.parametrize(
    ("cap", "expected"), [(64, 64), (63, 32), (24, 16), (2, 2), (1, 1), (0, 1)]
)
def test_the_search_ends_at_the_cap_or_before_a_batch_that_fails(cap: int, expected: int) -> None:
    trial = Scripted(memory=10**6, each=1)
    assert trial.largest(cap) == expected == max(trial.tried)
    for limit, size in ((9, 8), (0, 1)):
        assert Scripted(memory=10**6, each=1, limit=limit).largest(64) == size


def test_a_peak_that_grows_faster_than_the_batch_is_followed() -> None:
    class Square(Scripted):
        def peak(self, size: int) -> int | None:
            return 100 + size * size if super().peak(size) else None

    trial = Square(memory=1000, each=1)
    # 4 -> 116, 8 -> 164, 16 -> 356; the line to 32 is 356 + 24 * 16 = 740 < 900, and 1124 did not fit.
    assert trial.largest(64) in (16, 32)
    assert 64 not in trial.tried


def write_lines(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_control_groups_limit_what_is_free(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    job, step = groups / "job", groups / "memory/job/step"
    lines = ("4:cpu,memory:/job/step", "1:name=systemd:/x", "0::/job/step")
    #: Files that are written one set after the other, and the KiB that are free then.
    steps: list[tuple[dict[Path, tuple[str, ...]], int]] = [
        ({proc / "meminfo": ("MemTotal: 9000 kB", "MemAvailable:    5000 kB")}, 5000),
        # A group of the host, not mounted here.
        ({proc / "self/cgroup": lines}, 5000),
        # Version 2, set on the parent.
        (
            {
                job / "memory.max": (f"{4000 * 1024}",),
                job / "memory.current": (f"{3000 * 1024}",),
                job / "memory.stat": ("file 9", f"inactive_file {500 * 1024}"),
                job / "step/memory.max": ("max",),
                job / "step/memory.current": ("1",),
                job / "step/memory.stat": ("inactive_file 0",),
            },
            1500,
        ),
        # Version 1.
        (
            {
                step / "memory.limit_in_bytes": (f"{1000 * 1024}",),
                step / "memory.usage_in_bytes": (f"{900 * 1024}",),
                step / "memory.stat": (f"total_inactive_file {100 * 1024}",),
            },
            200,
        ),
        ({step / "memory.usage_in_bytes": (f"{9000 * 1024}",)}, 0),
    ]
    for files, free in steps:
        for path, content in files.items():
            write_lines(path, *content)
        assert free_memory(proc, groups) == free * 1024


def test_processes_of_one_machine_divide_its_memory() -> None:
    alone, shared = DeviceMemory("cpu"), DeviceMemory("cpu", share=4)
    assert 0 < alone.used() < alone.reachable()
    free = alone.reachable() - alone.used()
    assert shared.reachable() - shared.used() == pytest.approx(free / 4, rel=0.2)


def test_lack_of_memory_is_no_other_error() -> None:
    with pytest.raises(RuntimeError) as e:
        torch.empty(2**62, dtype=torch.uint8)
    for error in (e.value, torch.OutOfMemoryError("CUDA out of memory"), MemoryError()):
        assert ran_out(error)
    for other in (RuntimeError("shapes do not match"), ValueError("cannot allocate memory")):
        assert not ran_out(other)


@dataclass
class Small(Calculator):
    """A calculator whose memory holds `most` samples."""

    most: int = 10**9
    error: Exception = field(default_factory=lambda: torch.OutOfMemoryError("CUDA out of memory"))

    def encode(self, messages: Sequence[Any]) -> Mapping[str, Any]:
        inputs = super().encode(messages)
        if any("broken" in text for text in inputs["text"]):
            raise UserError("chat 0 of the batch cannot be read")
        return inputs

    def generate(
        self, inputs: Mapping[str, Any], samples: Sequence[str], **more: Any
    ) -> GeneratedBatch:
        if len(samples) > self.most:
            self.batches.append(list(samples))
            raise self.error
        return super().generate(inputs, samples, **more)


def names(*doc_ids: int) -> list[str]:
    return [f"sums/{doc_id}" for doc_id in doc_ids]


@pytest.mark.slow
def test_auto_finds_the_size_with_the_longest_prompts_and_uses_it(
    journal: Journal, tmp_path: Path
) -> None:
    questions = sums(10)
    questions[7] = ("1000000+2000000", "3000000")
    spec = make_spec(write_task(tmp_path / "t", questions), batch_size="auto")
    model = Small(most=4)
    result = evaluate_session(spec, model, journal)
    trials, run = model.batches[:4], model.batches[4:]
    assert trials == [names(7), names(7, 0), names(7, 0, 1, 2), names(7, *range(7))]
    assert run == [names(0, 1, 2, 3), names(4, 5, 6, 7), names(8, 9)]
    assert (result.batch_size, result.metrics["right"]["value"]) == (4, 1.0)
    assert journal.entries()[0] == {"batch_size": 4}
    # A resumed run forms the same batches, whatever fits by now.
    journal.path.write_bytes(b"".join(journal.path.read_bytes().splitlines(keepends=True)[:6]))
    roomy = Small()
    again = evaluate_session(spec, roomy, journal)
    assert roomy.batches == [names(4, 5, 6, 7), names(8, 9)]
    assert (again.batch_size, again.resumed, answers(again)) == (4, 5, answers(result))


@pytest.mark.slow
def test_a_bad_sample_does_not_shrink_the_batch(tmp_path: Path) -> None:
    questions = sums(8)
    questions[3] = ("broken, and the longest question of all", "0")
    spec = make_spec(write_task(tmp_path / "t", questions), batch_size="auto", max_errors=1)
    result = evaluate_session(spec, Small(), Journal(tmp_path / "journal.jsonl"))
    assert result.batch_size == 4  # seven are left, and eight are not seven
    assert [str(failure) for failure in result.failures] == [
        "sums/3: UserError: the chat cannot be read"
    ]


@pytest.mark.slow
def test_an_error_that_is_not_memory_leaves_the_search_to_the_run(tmp_path: Path) -> None:
    spec = make_spec(write_task(tmp_path / "t", sums(6)), batch_size="auto")
    model = Small(most=2, error=ValueError("no batches today"))
    result = evaluate_session(spec, model, Journal(tmp_path / "journal.jsonl"))
    assert (result.batch_size, result.n_samples) == (2, 6)


@pytest.mark.slow
def test_the_smallest_size_of_all_processes_counts(journal: Journal, tmp_path: Path) -> None:
    class WithOneThatHasRoomForTwo(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [value, 2] if isinstance(value, int) else [value]

    spec = make_spec(write_task(tmp_path / "t", sums(8)), batch_size="auto")
    model = Small()
    assert evaluate_session(spec, model, journal, None, WithOneThatHasRoomForTwo()).batch_size == 2
    assert journal.entries()[0] == {"batch_size": 2}


def test_a_batch_that_runs_out_later_is_answered_one_by_one(tmp_path: Path) -> None:
    spec = make_spec(write_task(tmp_path / "t", sums(6)), batch_size=4)
    model = Small(most=3)
    assert evaluate_session(spec, model, Journal(tmp_path / "journal.jsonl")).n_samples == 6
    assert [len(batch) for batch in model.batches] == [4, 1, 1, 1, 1, 2]


def test_the_key_holds_auto(tmp_path: Path) -> None:
    job = admit(commands.spec_of(f"store={tmp_path}", "engine.batch_size=auto"), Digests())
    assert job.parts["settings"]["engine"]["batch_size"] == "auto"
    assert (
        job.key
        != admit(commands.spec_of(f"store={tmp_path}", "engine.batch_size=8"), Digests()).key
    )


#: From the second trial on the process may only map so many MiB more than it has.
TIGHT = """
import resource, sys
import run
from espalier.harness.evaluation import batch_answers

plain, more = batch_answers.largest_batch, int(sys.argv[1]) * 2**20

def largest(peak_of, *bounds):
    def peak(size):
        if size == 2:
            status = open("/proc/self/status").read().splitlines()
            mapped = int(next(line for line in status if line.startswith("VmSize:")).split()[1]) * 1024
            resource.setrlimit(resource.RLIMIT_AS, (mapped + more,) * 2)
        found = peak_of(size)
        print("tried", size, found is not None, file=sys.stderr)
        return found

    return plain(peak, *bounds)

batch_answers.largest_batch = largest
sys.exit(run.main(sys.argv[2:]))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not hold to RLIMIT_AS")
def test_where_memory_really_runs_out_the_run_is_done_with_less(tmp_path: Path) -> None:
    script = tmp_path / "tight.py"
    script.write_text(TIGHT)
    arguments = ["method=none", "benchmark=seedling_rec", "limit=32", "engine.batch_size=auto"]
    arguments.append("json=true")
    done = subprocess.run(
        [sys.executable, str(script), "60", f"store={tmp_path}", "model.device=cpu", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    size = row["extra"]["batch_size"]
    tried = [line.split()[1:] for line in done.stderr.splitlines() if line.startswith("tried ")]
    assert tried[-1] == [str(2 * size), "False"]
    assert 2 <= size < 32
    assert row["extra"]["environment"]["batch_size"] == size
    assert (row["n_samples"], row["extra"]["failures"]) == (32, [])
    assert row["metrics"]["acc_at_50"]["value"] > 0.9
