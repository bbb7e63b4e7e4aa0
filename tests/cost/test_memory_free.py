"""Whether a tensor fits into half of the free memory."""

from __future__ import annotations

import pytest
import torch

from espalier.harness.cost import memory as available
from espalier.harness.cost.memory import fits_in_free_memory


def test_half_of_the_free_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class DeviceMemory:
        def __init__(self, device: str) -> None:
            assert device == "cpu"

        def used(self) -> int:
            return 5 * 2**30

        def reachable(self) -> int:
            return 7 * 2**30

    monkeypatch.setattr(available, "DeviceMemory", DeviceMemory)
    cpu = torch.device("cpu")
    assert fits_in_free_memory(2**30, cpu)
    assert not fits_in_free_memory(2**30 + 1, cpu)
    monkeypatch.setattr(DeviceMemory, "reachable", DeviceMemory.used)
    assert fits_in_free_memory(available.SMALL, cpu)  # nothing is asked for little
    assert not fits_in_free_memory(available.SMALL + 1, cpu)
