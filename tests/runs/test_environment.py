"""A row names the code and the devices that made it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest
from torch import nn

import espalier
from espalier.harness.runs import environment


def test_a_process_calls_git_once() -> None:
    """A sweep's rows cost no process each, and name the code that was loaded."""
    with patch.object(subprocess, "run", wraps=subprocess.run) as run:
        environment.commit.cache_clear()
        assert environment.commit() == environment.commit()
    assert run.call_count == 1


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
