"""What a row says of where it was made."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from torch import nn

from espalier.harness.runs import environment


def test_a_process_asks_git_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep's rows cost no process each, and name the code that was loaded."""
    asked: list[Any] = []
    plain = subprocess.run

    def run(command: list[str], **how: Any) -> Any:
        asked.append(command)
        return plain(command, **how)

    monkeypatch.setattr(subprocess, "run", run)
    environment.commit.cache_clear()
    assert environment.commit() == environment.commit()
    assert len(asked) == 1


def test_weights_outside_a_device_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False, device="meta"))
    assert environment.placement(model) == {
        "weights_gib": {"cpu": 0.0, "offloaded": 0.0},
        "cards": [],
    }
