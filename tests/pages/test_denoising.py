"""The picture of what deciders look at, from step to step."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.pages.denoising_page import ENDED, MASKED, PLACES, main


@pytest.mark.slow
def test_a_step_for_each_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--write", str(tmp_path), "--scene", "0", "--ratio", "0.9"]) == 0
    told, *paths = capsys.readouterr().out.splitlines()
    assert told.startswith("scene 0: ")
    assert [Path(path).name for path in paths] == ["steps.png", "steps.svg"]
    picture = (tmp_path / "steps.svg").read_text()
    assert f">step {PLACES}<" in picture
    # Before the first step all places are masked, before the last one a single one is.
    assert picture.count(f">{MASKED}<") == sum(range(1, PLACES + 1))
    assert f">{ENDED}<" in picture
