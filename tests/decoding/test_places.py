"""Devices of both sides: one name per device, and the number that each side occupies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from espalier.harness.decoding.speculative.drafters import (
    devices_of,
    extra_gpus,
    halves,
    indexed,
    one_gpu,
    placed,
    transport_of,
)
from tests.tiny import LLAVA

CPU, ONE, TWO = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_cuda_is_the_current_device() -> None:
    assert indexed("cuda") == indexed(torch.device("cuda")) == ONE
    assert indexed("cuda:1") == TWO
    assert indexed("cpu") == CPU
    assert placed(replace(LLAVA, device="cuda")) == placed(replace(LLAVA, device="cuda:0"))


def test_where_both_sides_run() -> None:
    unnamed = torch.device("cuda")
    assert transport_of("auto", False, [ONE], [TWO]) == "sequential"
    assert transport_of("auto", True, [CPU], [CPU]) == "processes"
    assert transport_of("auto", True, [ONE], [ONE]) == "threads"
    assert transport_of("auto", True, [ONE], [unnamed]) == "threads"
    assert transport_of("auto", True, [unnamed], [ONE]) == "threads"
    assert transport_of("auto", True, [ONE], [TWO]) == "processes"
    assert transport_of("auto", True, [ONE, TWO], [TWO]) == "processes"
    assert transport_of("sequential", True, [ONE], [TWO]) == "sequential"
    assert not one_gpu([CPU], [CPU])
    assert halves([0, 1, 2]) == ([0, 1], [2])
    assert halves([0]) is None


def test_a_model_is_on_its_device_or_spread_over_all() -> None:
    assert devices_of(replace(LLAVA, device="cuda")) == (ONE,)
    assert devices_of(replace(LLAVA, device="cuda:1")) == (TWO,)
    assert devices_of(replace(LLAVA, device="cuda", device_map="auto")) == (ONE, TWO)
    assert devices_of(replace(LLAVA, device="cpu", device_map="auto")) == (CPU,)


def test_gpus_that_the_draft_occupies_besides_the_target() -> None:
    assert extra_gpus([ONE], [torch.device("cuda")]) == 0
    assert extra_gpus([ONE], [TWO]) == 1
    assert extra_gpus([ONE, TWO], [TWO]) == 0
    assert extra_gpus([TWO], [ONE, TWO]) == 1
    assert extra_gpus([CPU], [ONE]) == 1
    assert extra_gpus([ONE], [CPU]) == 0
