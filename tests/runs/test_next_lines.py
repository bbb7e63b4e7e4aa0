"""The command that a run suggests, as a shell reads it, after every kind of override."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

import run
from espalier.harness.paths import ROOT

#: Keeps runs short.
SHORT = ("limit=2", "engine.paired=0", "engine.warmup=0")

#: A class of the user, with a hyper-parameter that others lack.
RECIPE = ROOT / "docs/recipes/plugin/espalier_example/token_norm.py"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a method and data of the user."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(RECIPE.read_text())
    Image.new("RGB", (96, 96), "red").save(tmp_path / "it's red.png")
    (tmp_path / "my.csv").write_text("image,question,answer\nit's red.png,is there a star ?,no\n")
    (tmp_path / "bare.csv").write_text("image,answer\nit's red.png,no\n")
    return tmp_path


def suggested(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the arguments of the command that a run suggests, as a shell splits them; none without one."""
    capsys.readouterr()
    assert run.main([*arguments, *SHORT]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: ")]
    if not lines:
        return []
    typed = lines[0].removeprefix("next: ")
    split = subprocess.check_output(["bash", "-c", f"printf '%s\\0' {typed}"], text=True)
    _, script, *words = split.removesuffix("\0").split("\0")
    assert script.endswith("run.py")
    return words


@pytest.mark.sampled
@pytest.mark.parametrize(
    "line",
    [
        ["method=fastv", "method.params.K=3", "ratio=0.9"],
        ["-m", "method=none,random,fastv", "method.params.K=1,3", "ratio=0.9"],
        ["method=random", "method.params.layer=2", "ratio=0.5"],
        ["method=mine.py:TokenNorm", "ratio=0.9"],
        ["method=mine.py:TokenNorm", "method.params.p=1", "ratio=0.9"],
        ["-m", "method=none,mine.py:TokenNorm", "method.params.p=1,2", "keep=64"],
        ["benchmark=data", "benchmark.path=my.csv", "method=fastv", "keep=64"],
        [
            "benchmark=data",
            "benchmark.path=bare.csv",
            "benchmark.question='is there a star ?'",
            "ratio=0.5",
        ],
        [
            "benchmark=data",
            "benchmark.path=bare.csv",
            'benchmark.question="what\'s, in (this) picture?"',
            "ratio=0.5",
        ],
        [
            "benchmark=data",
            "benchmark.path=my.csv",
            "+benchmark.prompt.post_prompt=''",
            "ratio=0.5",
        ],
        ["method=none"],
        ["method=none", "keep=10%"],
        ["method=snapkv", "ratio=0.9", "benchmark=seedling_caption"],
        ["model=seedling_diffusion", "method=fastv_first_step", "ratio=0.5"],
        ["model=seedling_diffusion", "method=none"],
    ],
    ids=" ".join,
)
def test_what_is_suggested_runs(
    line: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = suggested([*line, f"store={folder / 'my store'}"], capsys)
    assert run.main([*words, "--dry"]) == 0
    assert "cannot run" not in capsys.readouterr().out


@pytest.mark.sampled
@pytest.mark.parametrize(
    "line",
    [
        ["method=divprune", "compressor=snapkv", "ratio=0.5", "compressor.ratio=0.5"],
        ["method=divprune+fastv", "ratio=0.5"],
        ["method=vanilla_sd", "ratio=0.9", "method.draft_options={dtype: float32}"],
    ],
    ids=" ".join,
)
def test_what_has_no_control_suggests_nothing(
    line: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suggested([*line, f"store={folder / 'my store'}"], capsys) == []
