"""The picture of what deciders look at from step to step, and times of answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.models.build_adapter import load_adapter
from espalier.methods.none import NoReduction
from lab.pages.denoising_page import ENDED, MASKED, PLACES, main
from lab.pages.denoising_time_page import MODEL, POINT, timed


@pytest.mark.slow
def test_a_step_for_each_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--write", str(tmp_path), "--scene", "0", "--ratio", "0.9"]) == 0
    summary, *paths = capsys.readouterr().out.splitlines()
    assert summary.startswith("scene 0: ")
    assert [Path(path).name for path in paths] == ["steps.png", "steps.svg"]
    picture = (tmp_path / "steps.svg").read_text()
    assert f">step {PLACES}<" in picture
    # Before the first step all places are masked, before the last one a single one is.
    assert picture.count(f">{MASKED}<") == sum(range(1, PLACES + 1))
    assert f">{ENDED}<" in picture


def point_of(*values: Any) -> dict[str, Any]:
    return dict(zip(POINT, values, strict=True))


@pytest.mark.slow
def test_more_steps_take_longer() -> None:
    """Sixteen steps take longer than one."""
    cells = [
        point_of("seedling_ocr", 0.0, steps, None, False, 40, steps / 20, 1.0, 0.0)
        for steps in (1, 16)
    ]
    model = build_spec(read_command([f"model={MODEL}", "model.device=cpu"]).cells[0]).model
    points = timed([(cell, NoReduction()) for cell in cells], load_adapter(model), rounds=1)
    assert 0 < points.ms[0] < points.ms[1]
