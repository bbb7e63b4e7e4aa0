"""What a row says of where it was made."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import espalier
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


def test_an_installed_package_names_its_version_even_inside_somebodys_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    package = tmp_path / "lib" / "espalier"
    package.mkdir(parents=True)
    monkeypatch.setattr(environment, "ROOT", package)
    environment.commit.cache_clear()
    assert environment.commit() == f"espalier-{espalier.__version__}"
    environment.commit.cache_clear()


def test_weights_outside_a_device_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False, device="meta"))
    assert environment.placement(model) == {
        "weights_gib": {"cpu": 0.0, "offloaded": 0.0},
        "cards": [],
    }
