"""Reading ahead of the answers: same answers, journal and errors as in turn, in bounded memory, stopped at once."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.harness.evaluation import prefetch as feeding
from espalier.harness.evaluation.evaluate import SampleErrors, evaluate, evaluate_session
from espalier.harness.evaluation.prefetch import AHEAD, ReadingTimes, batches_ahead, read_ahead
from espalier.harness.kinds.lookup import kind_of, method_of
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.paths import ROOT
from espalier.harness.store import Journal
from tests import commands
from tests.arithmetic import Calculator, make_spec, sums, write_task
from tests.families import FAMILIES


def double(item: int, between: Callable[[], None]) -> int:
    between()
    if item == 3:
        raise OSError("item 3 is torn")
    return 2 * item


def test_items_come_in_order_and_an_error_at_its_own_place() -> None:
    with read_ahead(range(6), 2, lambda: double) as take:
        results: list[object] = []
        for _ in range(6):
            try:
                results.append(take())
            except OSError as error:
                results.append(str(error))
    assert results == [0, 2, 4, "item 3 is torn", 8, 10]


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_more_is_made_than_fits_ahead(ahead: int) -> None:
    begun: list[int] = []

    def make(item: int, between: Callable[[], None]) -> int:
        begun.append(item)
        return item

    with read_ahead(range(12), ahead, lambda: make) as take:
        for taken in range(4):
            deadline = time.monotonic() + 120
            while len(begun) < taken + ahead and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(0.05)  # room for one too many
            assert begun == list(range(taken + ahead))
            assert take() == taken
    assert "feeder" not in {thread.name for thread in threading.enumerate()}


def test_a_reader_that_hangs_does_not_keep_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "LEAVE", 0.2)
    hang = threading.Event()

    def make(item: int, between: Callable[[], None]) -> None:
        hang.wait(600)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), read_ahead([1, 2], 1, lambda: make):
        raise KeyboardInterrupt
    assert time.monotonic() - started < 300
    hang.set()


@dataclass
class Strict(Calculator):
    """A calculator that refuses the question `9+7` while it is read, and notes which thread read what."""

    broken: str = "9+7"
    read: list[tuple[str, str]] = field(default_factory=list)

    def encode(self, messages: Sequence[Any]) -> Mapping[str, Any]:
        inputs = super().encode(messages)
        self.read += [(threading.current_thread().name, text) for text in inputs["text"]]
        if self.broken in inputs["text"]:
            raise OSError(f"{self.broken} is truncated\nby a disk")
        return inputs


@pytest.mark.parametrize("size", [1, 4])
def test_journal_and_errors_are_those_of_reading_in_turn(tmp_path: Path, size: int) -> None:
    outcomes = []
    for ahead in (0, 1, 3):
        journal = Journal(tmp_path / f"{ahead}.jsonl")
        spec = make_spec(write_task(tmp_path / "t", sums(14)), batch_size=size, prefetch=ahead)
        model = Strict()
        with pytest.raises(SampleErrors) as error:
            evaluate_session(spec, model, journal)
        outcomes.append((journal.path.read_bytes(), str(error.value), model.batches))
        assert {name for name, _ in model.read} >= ({"feeder"} if ahead else {"MainThread"})
        # The rest, and only the rest, is read when the run goes on.
        second = Strict(broken="")
        done = evaluate_session(spec, second, journal)
        assert done.resumed == 13
        texts = [text for name, text in second.read]
        assert texts == ([f"{i}+7" for i in range(8, 12)] if size == 4 else ["9+7"])
        assert set(done.reading_ms or ()) == {"took", "waited"}
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert "sums/9: OSError: 9+7 is truncated" in outcomes[0][1]


def test_nothing_beyond_the_limit_is_read(tmp_path: Path) -> None:
    model, folder = Strict(), write_task(tmp_path / "t", sums(14))
    evaluate_session(make_spec(folder, prefetch=5, limit=3), model, Journal(tmp_path / "j.jsonl"))
    assert [text for _, text in model.read] == ["0+7", "1+7", "2+7"]


@pytest.mark.slow
def test_a_slow_reader_is_waited_for_and_the_times_say_so(tmp_path: Path) -> None:
    class Slow(Calculator):
        def __init__(self) -> None:
            super().__init__()
            self.reads = threading.Semaphore(0)

        def encode(self, messages: Sequence[Any]) -> Mapping[str, Any]:
            time.sleep(0.1)
            self.reads.release()
            return super().encode(messages)

    class Busy(Slow):
        def generate(self, *arguments: Any, **options: Any) -> Any:
            """Take until the next of the four batches is read."""
            for _ in range({0: 2, 3: 0}.get(len(self.batches), 1)):
                assert self.reads.acquire(timeout=300)
            return super().generate(*arguments, **options)

    def reading(model: Calculator, ahead: int) -> Mapping[str, float]:
        spec = make_spec(write_task(tmp_path / "t", sums(8)), prefetch=ahead)
        journal = Journal(tmp_path / f"{type(model).__name__}{ahead}.jsonl")
        return evaluate_session(spec, model, journal).reading_ms or {}

    for ahead in (0, 2):
        slow = reading(Slow(), ahead)
        assert slow["took"] >= 50  # 100 ms for two samples
        assert slow["waited"] > 0.5 * slow["took"]  # nothing to hide behind
    busy = reading(Busy(), 2)
    assert busy["took"] >= 50
    assert busy["waited"] < 0.75 * busy["took"]  # of four batches the first alone is waited for


def test_times_add_up_over_processes() -> None:
    total = sum([ReadingTimes(4, 2.0, 1.0), ReadingTimes(4, 4.0, 0.0)], ReadingTimes())
    assert (total.ms, ReadingTimes().ms) == ({"took": 750.0, "waited": 125.0}, None)


def test_auto_reads_ahead_only_where_the_model_leaves_cores_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(tmp_path, prefetch="auto")
    gpu = replace(spec, model=replace(spec.model, device="cuda"))
    drafted = replace(gpu, method=replace(gpu.method, draft=gpu.model))
    timed = replace(gpu, benchmark=replace(gpu.benchmark, prompt_tokens=100))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert (batches_ahead(spec), batches_ahead(gpu)) == (0, AHEAD)
    assert batches_ahead(gpu, processes=2) == batches_ahead(drafted) == batches_ahead(timed) == 0
    engine = replace(gpu.engine, prefetch=5)
    assert batches_ahead(replace(spec, engine=engine)) == 5
    assert batches_ahead(replace(timed, engine=engine)) == 0


@pytest.mark.sampled(24)
@pytest.mark.parametrize(
    "overrides",
    [
        ("method=fastv", "ratio=0.75"),
        ("method=h2o", "ratio=0.5", "engine.rescore=true"),
        ("method=pearl", "engine.transport=sequential", "engine.compare=false", "limit=2"),
        ("model=seedling_diffusion", "method=d3tom", "ratio=0.5"),
    ],
    ids=["reducer", "compressor", "decoder", "denoiser"],
)
def test_answers_of_every_kind_are_the_same_to_the_byte(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    common = ("limit=4", "model.device=cpu", "engine.batch_size=2", "engine.paired=0")
    spec = commands.spec_of(*common, "benchmark=seedling_rec", "engine.warmup=0", *overrides)
    assert spec.engine.prefetch == "auto"
    method = method_of(spec.method)
    spec = kind_of(method, spec).normalise(spec, method)
    adapter = load_adapter(spec.model)
    outcomes = []
    for ahead in (0, 2):
        journal = Journal(tmp_path / f"{ahead}.jsonl")
        ahead_spec = replace(spec, engine=replace(spec.engine, prefetch=ahead))
        done = evaluate(ahead_spec, adapter, method, journal)
        entries = [
            {key: entry.get(key) for key in ("doc_id", "asked", "raw", "answer", "scores")}
            for entry in journal.entries()
        ]
        counts = [
            (sample.record.visual, sample.record.kept, sample.record.kv_entries)
            for sample in done.samples
        ]
        outcomes.append((json.dumps(entries), counts, done.metrics))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    "name", ["llava", "qwen2_vl_video", "internvl", "deepseek_ocr", "llava_video"]
)
def test_a_processor_of_its_own_prepares_the_same_beside_another(name: str) -> None:
    """Tokenizers take one thread at a time: the reader's is a copy, whatever the other does meanwhile."""
    family = FAMILIES[name]
    adapter = load_adapter(family.spec)
    chats = list(family.chats)
    expected = adapter.encode(chats)
    assert adapter.thread_copy.processor.tokenizer is not adapter.processor.tokenizer
    assert adapter.thread_copy.model is adapter.model
    batches: list[Mapping[str, Any]] = []

    def read() -> None:
        batches.extend(adapter.to_device(adapter.thread_copy.prepare(chats)) for _ in range(3))

    thread = threading.Thread(target=read)
    thread.start()
    while thread.is_alive():
        adapter.decode(expected["input_ids"].clamp(min=0))
        thread.join(0.01)  # a loop without a pause would keep Python's lock to itself
    assert len(batches) == 3
    for batch in batches:
        assert batch.keys() == expected.keys()
        tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
        torch.testing.assert_close(tensors, {key: expected[key] for key in tensors}, rtol=0, atol=0)


SCRIPT = """
import signal, sys, time
from pathlib import Path
from espalier.harness.evaluation.evaluate import evaluate_session
from espalier.harness.runs.streams import stoppable
from espalier.harness.store import Journal
from tests.arithmetic import Calculator, make_spec
# A shell that runs the tests in the background lets them ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
class Slow(Calculator):
    def encode(self, messages):
        if len(self.batches) > 1:
            Path(sys.argv[3]).touch()
            time.sleep(600)
        return super().encode(messages)
    def generate(self, *given, **more):
        time.sleep(0.2)
        return super().generate(*given, **more)
try:
    with stoppable():
        evaluate_session(make_spec(Path(sys.argv[1]), prefetch=2), Slow(), Journal(Path(sys.argv[2])))
except KeyboardInterrupt as stopped:
    sys.exit(stopped.code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_at_once_and_keeps_what_is_finished(
    journal: Journal, tmp_path: Path, number: int
) -> None:
    folder = write_task(tmp_path / "t", sums(12))
    reading = tmp_path / "reading"
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder), str(journal.path)]
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen([*command, str(reading)], cwd=root, env=environment) as process:
        try:
            while not reading.exists():
                assert process.poll() is None, "ended before it was reading"
                time.sleep(0.05)
            process.send_signal(number)
            # The reader sleeps for ten minutes.
            assert process.wait(300) == 128 + number
        finally:
            process.kill()
    assert [entry["doc_id"] for entry in journal.entries()][:4] == [0, 1, 2, 3]


# ------------------------------------------------------------------ freed memory


#: Takes and frees 36 MB ten times, before, inside and behind; prints the page faults of each, and the megabytes kept.
FAULTS = """
import resource
from espalier.harness.evaluation.prefetch import read_ahead

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        bytearray(36_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6

outside, start = faults(), resident()
with read_ahead([1, 2], 1, lambda: lambda item, check: item):
    inside, held = faults(), resident()
print(outside, inside, faults(), held - start, resident() - start)
"""


def measured(**environment: str) -> list[float]:
    settings = ("MALLOC_", "GLIBC_TUNABLES")
    unset = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    output = subprocess.run(
        [sys.executable, "-c", FAULTS],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**unset, **environment},
    ).stdout
    return [float(word) for word in output.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_freed_memory_is_used_again_and_then_given_back() -> None:
    outside, inside, behind, held, left = measured()
    assert inside < 0.3 * outside
    assert behind > 0.5 * outside
    assert held > 30
    assert left < 10


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_what_the_environment_says_stands() -> None:
    outside, inside, *_ = measured(MALLOC_MMAP_THRESHOLD_="131072")
    assert inside > 0.5 * outside
