"""Time of a side's work: launched work is waited for, in its own stream, and waiting does not count as work."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from espalier.harness.cost.clock import Clock
from espalier.harness.decoding.speculative.state_machine import Meter
from espalier.harness.decoding.speculative.transports import SequentialTransport

ONE, TWO = torch.device("cuda:0"), torch.device("cuda:1")


class Time:
    """The clocks of one thread: seconds pass when it works or waits, and never otherwise."""

    def __init__(self) -> None:
        self.wall = self.processor = 0.0

    def work(self, seconds: float) -> None:
        self.wall += seconds
        self.processor += seconds

    def wait(self, seconds: float) -> None:
        self.wall += seconds


class Stream:
    """A queue of kernels that run after their launch; `synchronize` waits for the last of them."""

    def __init__(self, clock: Time) -> None:
        self.clock = clock
        self.free = 0.0
        self.waited = 0

    def launch(self, seconds: float) -> None:
        self.free = max(self.free, self.clock.wall) + seconds

    def synchronize(self) -> None:
        self.waited += 1
        self.clock.wait(max(self.free - self.clock.wall, 0.0))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.stream, event.at = self, max(self.free, self.clock.wall)
        return event

    def wait_event(self, event: Event) -> None:
        self.free = max(self.free, event.at)


class Event:
    stream: Stream
    at: float

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed = enable_timing

    def synchronize(self) -> None:
        self.stream.synchronize()

    def elapsed_time(self, other: Event) -> float:
        assert self.timed
        assert other.timed
        return 1000 * (other.at - self.at)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    """The clocks that meters, transports and the clock of phases read."""
    clock = Time()
    clocks = SimpleNamespace(perf_counter=lambda: clock.wall, thread_time=lambda: clock.processor)
    monkeypatch.setattr("espalier.harness.decoding.speculative.state_machine.time", clocks)
    monkeypatch.setattr("espalier.harness.decoding.speculative.transports.time", clocks)
    monkeypatch.setattr(
        "espalier.harness.cost.clock.perf_counter_ns", lambda: round(clock.wall * 1_000_000_000)
    )
    return clock


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch, clock: Time) -> dict[torch.device, Stream]:
    """The streams that the calling thread uses on each of two GPUs."""
    streams = {ONE: Stream(clock), TWO: Stream(clock)}
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return streams


def test_waiting_is_no_work(clock: Time) -> None:
    def both() -> str:
        clock.work(0.02)
        clock.wait(0.05)
        return "done"

    result, lap = Meter().run(both)
    assert result == "done"
    assert lap.wall == pytest.approx(0.07)
    assert lap.busy == pytest.approx(0.02)


def test_a_processor_that_is_taken_away_is_no_work() -> None:
    """The real clocks: a thread that sleeps uses no processor time."""
    _, lap = Meter().run(lambda: time.sleep(0.2))
    assert lap.wall >= 0.2
    assert lap.busy < 0.1


def test_work_that_was_only_launched_is_waited_for(streams: dict[torch.device, Stream]) -> None:
    """As with sampling, where rows stay on the device."""
    meter = Meter.of([ONE])
    _, lap = meter.run(lambda: streams[ONE].launch(0.05))
    assert lap.wall == pytest.approx(0.05)
    assert lap.busy == pytest.approx(0.05)
    assert streams[TWO].waited == 0


@pytest.mark.parametrize("devices", [(ONE, TWO), (TWO, ONE)])
def test_a_spread_side_works_as_long_as_its_last_device(
    streams: dict[torch.device, Stream], devices: tuple[torch.device, ...]
) -> None:
    def forward() -> None:
        streams[ONE].launch(0.02)
        streams[TWO].launch(0.05)  # it gets its input from the first, and waits for it

    _, lap = Meter.of(devices).run(forward)
    assert lap.wall == pytest.approx(0.05)
    assert lap.busy == pytest.approx(0.05)


@pytest.mark.parametrize("play", ["alone", "in turn"])
def test_transports_time_the_target_to_its_end(
    streams: dict[torch.device, Stream], play: str
) -> None:
    def rows(*drafted: Any) -> list[int]:
        streams[ONE].launch(0.05)
        return [0]

    target, draft = Meter.of([ONE]), Meter.of([TWO])
    plays = {
        "alone": lambda: SequentialTransport(target).verify_only(rows),
        "in turn": lambda: SequentialTransport(target, draft).in_turn(lambda: None, rows),
    }
    done = plays[play]()
    assert done.verifying.wall == pytest.approx(0.05)
    assert done.seconds == pytest.approx(0.05)
    assert done.drafting.wall == 0


def test_the_clock_waits_for_its_own_stream_alone(
    streams: dict[torch.device, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side's stream on the same GPU goes on."""
    stalled: list[object] = []
    all_of: Callable[..., None] = stalled.append
    monkeypatch.setattr(torch.cuda, "synchronize", all_of)
    phases = Clock(ONE)
    with phases.phase("prefill"):
        streams[ONE].launch(0.03)
    assert phases.totals_ms()["prefill"] == pytest.approx(30)
    assert not stalled


def test_a_prefill_ends_with_its_kernels(streams: dict[torch.device, Stream], clock: Time) -> None:
    streams[ONE].launch(0.03)
    Meter.of([ONE]).wait()
    assert clock.wall == pytest.approx(0.03)
    Meter.of([torch.device("cpu")]).wait()
    assert streams[TWO].waited == 0


def test_phases_of_several_cards_begin_and_end_together(
    streams: dict[torch.device, Stream], clock: Time
) -> None:
    """Without a wait of the host, which only launches."""
    phases = Clock(ONE, TWO)
    with phases.phase("vision"):
        streams[ONE].launch(0.05)
    with phases.phase("prefill"):
        streams[ONE].launch(0.02)
        streams[TWO].launch(0.02)
    assert clock.wall == 0
    assert phases.totals_ms() == pytest.approx({"vision": 50, "prefill": 20})
