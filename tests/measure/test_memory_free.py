"""Whether a tensor fits beside what is there: half of the free memory counts."""

from __future__ import annotations

import pytest
import torch

from harness.measure import room
from harness.measure.room import fits_beside


def test_half_of_the_free_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Room:
        def __init__(self, device: str) -> None:
            assert device == "cpu"

        def used(self) -> int:
            return 5 * 2**30

        def reachable(self) -> int:
            return 7 * 2**30

    monkeypatch.setattr(room, "Room", Room)
    cpu = torch.device("cpu")
    assert fits_beside(2**30, cpu)
    assert not fits_beside(2**30 + 1, cpu)
    monkeypatch.setattr(Room, "reachable", Room.used)
    assert fits_beside(room.SMALL, cpu)  # nothing is asked for little
    assert not fits_beside(room.SMALL + 1, cpu)
