"""What a side's work takes: work that is launched is waited for, in its own stream, and waiting is no work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.decoding.meter import Meter
from harness.decoding.transports import Sequential, alone
from harness.measure.clock import Clock
from tests.decoding.drafters import work

ONE, TWO = torch.device("cuda:0"), torch.device("cuda:1")


class Stream:
    """A queue whose work takes time after its launch; nobody waits for it but who asks."""

    def __init__(self) -> None:
        self.free = 0.0
        self.waited = 0

    def launch(self, seconds: float) -> None:
        self.free = max(self.free, time.perf_counter()) + seconds

    def synchronize(self) -> None:
        self.waited += 1
        time.sleep(max(self.free - time.perf_counter(), 0.0))


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Stream) -> None:
        self.stream, self.at = stream, max(stream.free, time.perf_counter())

    def synchronize(self) -> None:
        self.stream.synchronize()

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.at - self.at)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, Stream]:
    """The streams that the calling thread uses on each of two GPUs."""
    found = {ONE: Stream(), TWO: Stream()}
    monkeypatch.setattr(torch.cuda, "current_stream", found.__getitem__)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return found


def test_waiting_is_no_work() -> None:
    def both() -> str:
        work(0.02)
        time.sleep(0.05)
        return "done"

    found, lap = Meter().run(both)
    assert found == "done"
    assert lap.wall >= 0.07
    assert 0.02 <= lap.busy < 0.05


def test_work_that_was_only_launched_is_waited_for(streams: dict[torch.device, Stream]) -> None:
    """As with sampling, whose rows stay on the device."""
    meter = Meter.of([ONE])
    _, lap = meter.run(lambda: streams[ONE].launch(0.05))
    assert lap.wall >= 0.05
    assert lap.busy == pytest.approx(0.05, abs=0.02)
    assert streams[TWO].waited == 0


@pytest.mark.parametrize("devices", [(ONE, TWO), (TWO, ONE)])
def test_a_spread_side_works_as_long_as_its_last_device(
    streams: dict[torch.device, Stream], devices: tuple[torch.device, ...]
) -> None:
    def forward() -> None:
        streams[ONE].launch(0.02)
        streams[TWO].launch(0.05)  # it gets its input from the first, and waits for it

    _, lap = Meter.of(devices).run(forward)
    assert lap.wall >= 0.05
    assert lap.busy == pytest.approx(0.05, abs=0.02)


@pytest.mark.parametrize("play", ["alone", "in turn"])
def test_transports_time_the_target_to_its_end(
    streams: dict[torch.device, Stream], play: str
) -> None:
    def rows(*drafted: Any) -> list[int]:
        streams[ONE].launch(0.05)
        return [0]

    target, draft = Meter.of([ONE]), Meter.of([TWO])
    plays = {
        "alone": lambda: alone(rows, target),
        "in turn": lambda: Sequential(target, draft).in_turn(lambda: None, rows),
    }
    done = plays[play]()
    assert done.verifying.wall >= 0.05
    assert done.seconds >= 0.05
    assert done.drafting.wall < 0.05


def test_the_clock_waits_for_its_own_stream_alone(
    streams: dict[torch.device, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side's stream on the same GPU goes on."""
    stalled: list[object] = []
    all_of: Callable[..., None] = stalled.append
    monkeypatch.setattr(torch.cuda, "synchronize", all_of)
    clock = Clock(ONE)
    with clock.phase("prefill"):
        streams[ONE].launch(0.03)
    assert clock.totals_ms()["prefill"] >= 30
    assert not stalled


def test_a_prefill_ends_with_its_kernels(streams: dict[torch.device, Stream]) -> None:
    streams[ONE].launch(0.03)
    start = time.perf_counter()
    Meter.of([ONE]).rest()
    assert time.perf_counter() - start >= 0.02
    Meter.of([torch.device("cpu")]).rest()
    assert streams[TWO].waited == 0
