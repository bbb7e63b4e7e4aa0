"""Clock, memory and the bound on speed-up."""

from __future__ import annotations

import mmap
import pickle
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from espalier.harness.cost import memory
from espalier.harness.cost.clock import Clock
from espalier.harness.cost.memory import fits_in_free_memory, kv_bytes, peak_memory
from espalier.harness.models.llava import LlavaAdapter
from espalier.harness.tools.rehearsal.simulated_cards import SimulatedCards

# ------------------------------------------------------------------------- clock


class Watch:
    """A counter of nanoseconds that moves only when told."""

    def __init__(self) -> None:
        self.now = 0

    def pass_ms(self, milliseconds: int) -> None:
        self.now += milliseconds * 1_000_000


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    monkeypatch.setattr("espalier.harness.cost.clock.perf_counter_ns", lambda: watch.now)
    return watch


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_phases_add_up_and_inner_ones_are_inside_outer_ones(clock: Clock, watch: Watch) -> None:
    for _ in range(2):
        with clock.phase("prefill"):
            watch.pass_ms(4)
            with clock.phase("select"):
                watch.pass_ms(2)
        watch.pass_ms(100)
    assert clock.totals_ms() == {"prefill": 12, "select": 4}
    assert clock.counts() == {"prefill": 2, "select": 2}


def test_a_phase_inside_itself_counts_once(clock: Clock, watch: Watch) -> None:
    with clock.phase("a"):
        watch.pass_ms(1)
        with clock.phase("a"):
            watch.pass_ms(5)
    assert clock.totals_ms() == {"a": 6}
    assert clock.counts() == {"a": 1}


def test_start_and_stop_are_the_same_phase_as_with(clock: Clock, watch: Watch) -> None:
    clock.start("decode")
    watch.pass_ms(2)
    clock.stop("decode")
    with clock.phase("decode"):
        watch.pass_ms(3)
    assert clock.totals_ms() == {"decode": 5}
    with pytest.raises(RuntimeError, match="'decode' stopped without a start"):
        clock.stop("decode")


def test_an_error_inside_a_phase_closes_it(clock: Clock, watch: Watch) -> None:

    def fail() -> None:
        watch.pass_ms(1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), clock.phase("a"):
        fail()
    assert clock.totals_ms() == {"a": 1}


def test_the_real_clock_measures_wall_time(clock: Clock) -> None:
    with clock.phase("a"):
        time.sleep(0.005)
    assert clock.totals_ms()["a"] >= 5


def test_reset_forgets_but_not_inside_a_phase(clock: Clock) -> None:
    with clock.phase("a"), pytest.raises(RuntimeError, match="open phase 'a'"):
        clock.reset()
    clock.reset()
    assert clock.totals_ms() == {}


def test_disabled_clock_records_nothing() -> None:
    clock = Clock(enabled=False)
    with clock.phase("a"):
        clock.start("b")
        clock.stop("c")
    assert clock.totals_ms() == {}


@pytest.mark.parametrize("cards", [("cuda:0",), ("cuda:1", "cpu", "cuda:2", "cuda:1")])
def test_cards_are_waited_for_when_times_are_read(cards: tuple[str, ...]) -> None:
    with SimulatedCards(3) as simulated:
        clock, off = Clock(*cards), Clock(*cards, enabled=False)
        for phase in (clock.phase("a"), clock.phase("a"), off.phase("a")):
            with phase:
                torch.ones(3, device=cards[0]).sum()
        assert simulated.waits == 0
        (total,) = clock.totals_ms().values()
        assert total > 0
        # Of the two ends the later is waited for first.
        assert simulated.waits == 1
        assert clock.totals_ms() == {"a": total}
        assert off.totals_ms() == {}


def test_a_phase_costs_microseconds(clock: Clock) -> None:
    started = time.thread_time()  # neighbours on the machine do not count
    for _ in range(2000):
        with clock.phase("a"):
            pass
    assert (time.thread_time() - started) / 2000 < 20e-6


# ------------------------------------------------------------------------- memory


def test_cache_counts_what_its_layers_hold() -> None:
    cache = DynamicCache()
    for layer, n in enumerate((7, 7, 3)):
        cache.update(torch.zeros(2, 4, n, 8), torch.zeros(2, 4, n, 8), layer)
    assert kv_bytes(cache) == 2 * (7 + 7 + 3) * 2 * 4 * 8 * 4
    assert kv_bytes(DynamicCache()) == 0


def test_a_view_holds_the_tensor_behind_it_and_shared_storage_counts_once() -> None:
    long = torch.zeros(1, 2, 100, 4, dtype=torch.float16)
    short = long[:, :, :10]
    assert kv_bytes([(short, short)]) == 100 * 2 * 4 * 2
    assert kv_bytes([(short.clone(), short.clone())]) == 2 * 10 * 2 * 4 * 2


def test_peak_sees_memory_that_is_gone_at_the_end() -> None:
    size = 48 * 2**20
    with peak_memory() as nothing:
        pass
    with peak_memory() as peak:
        # Straight from the kernel: the heap may hold that much that is free but still resident.
        block = mmap.mmap(-1, size)
        for page in range(0, size, mmap.PAGESIZE):
            block[page] = 1
        block.close()
    assert peak.bytes >= nothing.bytes + 0.9 * size
    if "over the block" in nothing.note:
        with peak_memory() as after:
            pass
        assert after.bytes < peak.bytes - 0.5 * size


def test_without_the_reset_the_note_says_what_the_number_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "self").mkdir()
    lines = "Name:\tx\nVmPeak:\t 99 kB\nVmHWM:\t    7 kB\nVmRSS:\t 5 kB\n"
    (tmp_path / "self/status").write_text(lines)
    monkeypatch.setattr(memory, "_RESET", tmp_path / "absent" / "clear_refs")
    monkeypatch.setattr(memory, "PROC", tmp_path)
    with peak_memory() as peak:
        pass
    assert "life of the process" in peak.note
    assert peak.bytes == 7 * 1024


def test_what_follows_the_stop_is_not_in_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([5, 9, 9])
    monkeypatch.setattr(memory, "resident_peak", lambda: next(peaks))
    with peak_memory() as peak:
        peak.stop()
        peak.stop()
    assert peak.bytes == 5
    assert pickle.loads(pickle.dumps(peak)) == peak
    with peak_memory() as full_peak:
        pass
    assert full_peak.bytes == 9


class Cards:
    """Stands in for torch.cuda: allocated bytes and peaks of each card."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **allocated: int) -> None:
        self.now = {f"cuda:{name[1:]}": held for name, held in allocated.items()}
        self.peak = {name: 10**9 for name in self.now}
        for name in ("reset_peak_memory_stats", "max_memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def take(self, card: str, held: int) -> None:
        self.now[card] = held
        self.peak[card] = max(self.peak[card], held)

    def reset_peak_memory_stats(self, card: torch.device) -> None:
        self.peak[str(card)] = self.now[str(card)]

    def max_memory_allocated(self, card: torch.device) -> int:
        return self.peak[str(card)]


def test_the_peak_of_several_cards_is_the_sum_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = Cards(monkeypatch, c0=100, c1=200)
    with peak_memory("cuda:0", "cuda:1", "cuda:0") as peak:
        cards.take("cuda:0", 150)
        cards.take("cuda:0", 90)
        cards.take("cuda:1", 270)
    assert peak.bytes == 150 + 270
    assert peak.note.endswith("over the block, summed over 2 devices")
    with peak_memory("cuda:1") as single:
        cards.take("cuda:0", 10**6)
    assert single.bytes == 270
    assert "summed" not in single.note


def test_a_model_computes_where_its_parameters_lie() -> None:
    """What is offloaded lies on the CPU or nowhere; it is computed on the cards all the same."""

    def devices(*places: str) -> list[str]:
        parameters = [SimpleNamespace(device=torch.device(place)) for place in places]
        adapter = LlavaAdapter.__new__(LlavaAdapter)
        adapter.model = SimpleNamespace(parameters=lambda: iter(parameters))
        return [str(device) for device in adapter.devices]

    assert devices("cpu", "cpu") == ["cpu"]
    assert devices("cuda:0", "cuda:1", "cuda:0", "cpu", "meta") == ["cuda:0", "cuda:1"]
    assert devices("meta", "cuda:1") == ["cuda:1"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_real_cards_are_waited_for_and_counted() -> None:
    clock, size = Clock("cuda:0", "cuda:1"), 2**26
    allocated = sum(torch.cuda.memory_allocated(card) for card in (0, 1))
    with peak_memory("cuda:0", "cuda:1") as peak, clock.phase("a"):
        for card in (0, 1):
            square = torch.ones(4096, 4096, device=f"cuda:{card}")
            square @ square
            del square
    assert peak.bytes >= allocated + 2 * size
    assert clock.totals_ms()["a"] > 0
    for card in (0, 1):
        assert torch.cuda.current_stream(card).query()  # nothing is left to do


def test_half_of_the_free_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class DeviceMemory:
        def __init__(self, device: str) -> None:
            assert device == "cpu"

        def used(self) -> int:
            return 5 * 2**30

        def reachable(self) -> int:
            return 7 * 2**30

    monkeypatch.setattr(memory, "DeviceMemory", DeviceMemory)
    cpu = torch.device("cpu")
    assert fits_in_free_memory(2**30, cpu)
    assert not fits_in_free_memory(2**30 + 1, cpu)
    monkeypatch.setattr(DeviceMemory, "reachable", DeviceMemory.used)
    assert fits_in_free_memory(memory.SMALL, cpu)  # nothing is asked for little
    assert not fits_in_free_memory(memory.SMALL + 1, cpu)
