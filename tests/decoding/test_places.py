"""Devices of both sides: one name per device, and the number that each side occupies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from espalier.harness.decoding.speculative import drafters
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
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processors and two GPUs."""
    monkeypatch.setattr(drafters, "processors", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_cuda_is_the_current_device() -> None:
    assert indexed("cuda") == indexed(torch.device("cuda")) == ONE
    assert indexed("cuda:1") == TWO
    assert indexed("cpu") == CPU
    assert placed(replace(LLAVA, device="cuda")) == placed(replace(LLAVA, device="cuda:0"))


UNNAMED = torch.device("cuda")


@pytest.mark.parametrize(
    ("transport", "overlap", "target", "draft", "chosen"),
    [
        ("auto", False, [ONE], [TWO], "sequential"),
        ("auto", True, [CPU], [CPU], "processes"),
        ("auto", True, [ONE], [ONE], "threads"),
        ("auto", True, [ONE], [UNNAMED], "threads"),
        ("auto", True, [UNNAMED], [ONE], "threads"),
        ("auto", True, [ONE], [TWO], "processes"),
        ("auto", True, [ONE, TWO], [TWO], "processes"),
        ("sequential", True, [ONE], [TWO], "sequential"),
    ],
)
def test_where_both_sides_run(transport, overlap, target, draft, chosen) -> None:
    assert transport_of(transport, overlap, target, draft) == chosen


@pytest.mark.parametrize(
    ("transport", "target", "draft", "chosen"),
    [
        ("auto", [CPU], [CPU], "sequential"),
        ("auto", [ONE], [TWO], "processes"),
        ("auto", [ONE], [CPU], "processes"),
        ("processes", [CPU], [CPU], "processes"),
    ],
)
def test_two_models_on_one_processor_take_turns(
    transport, target, draft, chosen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafters, "processors", lambda: 1)
    assert transport_of(transport, True, target, draft) == chosen


def test_cores_are_halved_and_a_processor_is_no_gpu() -> None:
    assert not one_gpu([CPU], [CPU])
    assert halves([0, 1, 2]) == ([0, 1], [2])
    assert halves([0]) is None


@pytest.mark.parametrize(
    ("place", "devices"),
    [
        ({"device": "cuda"}, (ONE,)),
        ({"device": "cuda:1"}, (TWO,)),
        ({"device": "cuda", "device_map": "auto"}, (ONE, TWO)),
        ({"device": "cpu", "device_map": "auto"}, (CPU,)),
    ],
)
def test_a_model_is_on_its_device_or_spread_over_all(place, devices) -> None:
    assert devices_of(replace(LLAVA, **place)) == devices


@pytest.mark.parametrize(
    ("target", "draft", "count"),
    [
        ([ONE], [UNNAMED], 0),
        ([ONE], [TWO], 1),
        ([ONE, TWO], [TWO], 0),
        ([TWO], [ONE, TWO], 1),
        ([CPU], [ONE], 1),
        ([ONE], [CPU], 0),
    ],
)
def test_gpus_that_the_draft_occupies_besides_the_target(target, draft, count) -> None:
    assert extra_gpus(target, draft) == count
