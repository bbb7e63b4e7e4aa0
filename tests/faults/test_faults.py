"""Kills at random moments lose at most the batch in flight: ten in CI, 200 before a release (docs/scale.md)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from espalier.harness.paths import ROOT

WHOLE = "each cell has one whole row, as undisturbed; nothing lost, nothing left behind"


def faults(*options: str) -> str:
    command = [sys.executable, "-m", "tests.faults", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("kills", "cells", "options"),
    [
        pytest.param(10, 4, ("--limit", "24", "--life", "0.6"), marks=pytest.mark.slow),
        pytest.param(200, 20, ("--limit", "60"), marks=pytest.mark.exhaustive),
    ],
)
def test_kills_lose_nothing(kills: int, cells: int, options: tuple[str, ...]) -> None:
    output = faults("--kills", str(kills), "--cells", str(cells), *options)
    assert output.startswith(f"{kills} kills (SIGKILL) of ")
    assert output.splitlines()[-1] == WHOLE
