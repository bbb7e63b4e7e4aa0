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


@pytest.mark.slow
def test_a_few_kills_lose_nothing() -> None:
    output = faults("--kills", "10", "--cells", "4", "--limit", "24", "--life", "0.6")
    assert output.startswith("10 kills (SIGKILL) of ")
    assert output.splitlines()[-1] == WHOLE


@pytest.mark.exhaustive
def test_200_kills_over_20_cells_and_4_writers_lose_nothing() -> None:
    output = faults("--kills", "200", "--cells", "20", "--limit", "60")
    assert output.startswith("200 kills (SIGKILL) of ")
    assert output.splitlines()[-1] == WHOLE
