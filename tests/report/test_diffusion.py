"""Tables and the picture of denoised answers from a store of made-up runs, and the sweep that brings real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.decoding.diffusion.denoising_settings import Denoising
from espalier.harness.errors import UserError
from espalier.harness.evaluation.samples import score_entries
from espalier.harness.paths import CONF
from espalier.harness.reports.curves.diffusion_report import (
    REPORT,
    cost_frame,
    main,
    read_step_panels,
)
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import Store
from tests.report.stored_rows import settings

N, LENGTH, GIGA = 100, 16, 1e9


def add(
    root: Path, method: str, mean: float, steps: int, ratio: float = 0.9, length: int = LENGTH
) -> None:
    """Write a run whose scores share each sample's difficulty with all others; an answer takes a millisecond a step."""
    difficulty = np.random.default_rng(0).permutation(N) / N
    directory = Store(root).run(f"{method}-{steps}-{ratio}-{length}")
    scores = {("reading", i): {"acc": float(level < mean)} for i, level in enumerate(difficulty)}
    directory.journal.append(*score_entries(scores))
    acts = method != "none"
    directory.commit(
        {
            "schema": 1,
            "run_key": directory.path.name,
            "model": "tiny",
            "method": method,
            "variant": "paper",
            "benchmark": "reading",
            "ratio": ratio if acts else 0.0,
            "budget_rule": "kept",
            "seed": 0,
            "n_samples": N,
            "metrics": {"acc": {"value": mean, "stderr": None}},
            "settings": settings(benchmark_generation={"steps": steps}),
            "flops": {"share_of_full": 1 - ratio * acts, "prefill_exact": GIGA * steps},
            "time": {"decode_ms_per_token": steps / length},
            "extra": {
                "headline": "acc",
                "label": "",
                "sites": [{"where": "block", "layer": 3}] if acts else [],
                "params": {},
                "diffusion": {"steps": float(steps), "length": float(length)},
            },
        }
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for steps, lost in ((16, 0.0), (8, 0.1)):
        add(tmp_path, "none", 0.9 - lost, steps, ratio=0.0)
        for ratio, random, good in ((0.5, 0.6, 0.8), (0.9, 0.3, 0.7)):
            add(tmp_path, "random", random - lost, steps, ratio)
            add(tmp_path, "d3tom", good - lost, steps, ratio)
    return tmp_path


def test_numbers_of_steps_are_kept_apart(root: Path) -> None:
    (first, second) = read_step_panels(root)["reading"]
    assert (first.steps, second.steps, first.length) == (16, 8, 16)
    for dealt, lost in ((first, 0.0), (second, 0.1)):
        start, half, tenth = cost_frame([dealt], "d3tom paper").itertuples()
        assert start.score.value == pytest.approx(0.9 - lost)
        assert (start.ratio, half.ratio, tenth.ratio) == (0, 0.5, 0.9)
        assert tenth.score.value == pytest.approx(0.7 - lost)
        assert (start.ms, start.flops) == (pytest.approx(dealt.steps), GIGA * dealt.steps)


@pytest.mark.slow
def test_tables_have_costs_and_gains(root: Path, tmp_path: Path) -> None:
    written, _ = REPORT.write(root, tmp_path / "out")
    assert [path.name for path in written] == ["merging.png", "merging.svg", "README.md"]
    assert written[0].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    picture = written[1].read_text()
    for text in (
        "every token",
        "d3tom paper",
        "16 steps",
        "8 steps",
        "10 %",
        "100 samples",
        "16.0",
    ):
        assert text in picture
    lines = written[2].read_text().splitlines()
    (costs,) = [line for line in lines if line.startswith("| 16 |")]
    assert costs.split(" | ")[1].startswith("90.0 [")
    assert "; 16.00; 16" in costs
    tables = [line for line in lines if line.startswith("| d3tom_paper |")]
    assert len(tables) == 2
    assert "70.0, +40.0 [" in tables[0]
    assert tables[0].endswith("**above*** |")


def test_what_cannot_be_compared_is_one_line(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["--store", str(tmp_path / "empty"), "--write", str(tmp_path)]) == 2
    assert "+experiment=diffusion" in capsys.readouterr().err
    with pytest.raises(UserError, match="--model='huge' is unknown; valid: tiny"):
        read_step_panels(root, "huge")
    add(root, "fastv", 0.5, steps=4)
    with pytest.raises(UserError, match="no rows of method=random on reading in 4 steps"):
        REPORT.write(root, tmp_path / "out")
    add(root, "none", 0.9, steps=4, ratio=0.0, length=8)
    with pytest.raises(UserError, match="answers of 8, 16 positions"):
        read_step_panels(root)


def test_the_sweep_asks_for_the_same_samples_of_every_cell() -> None:
    swept = yaml.safe_load((CONF / "experiment" / "diffusion.yaml").read_text())
    params = swept["hydra"]["sweeper"]["params"]
    methods, ratios, benchmarks = (
        params[key].split(",") for key in ("method", "ratio", "benchmark")
    )
    assert {"none", "random", "uniform", "d3tom_paper", "d3tom_t_paper", "d3tom_t_reversed"} < set(
        methods
    )
    assert (len(ratios), len(benchmarks)) == (5, 2)
    sweeps = [
        specs("+experiment=diffusion", f"method={method}", f"benchmark={benchmark}", "ratio=0.9")
        for method, benchmark in (("d3tom_t_reversed", "seedling_ocr"), ("none", "seedling_vqa"))
    ]
    for cells in sweeps:
        # The tasks' own length, which the model was trained with.
        settings = [Denoising.of(cell.generation, cell.model.facts.diffusion) for cell in cells]
        assert [denoising.steps for denoising in settings] == [16, 8, 4]
        assert {cell.benchmark.limit for cell in cells} == {swept["limit"]}
        assert {cell.model.name for cell in cells} == {"seedling_diffusion"}


def specs(*argv: str) -> list[RunSpec]:
    command = read_command(list(argv))
    assert command.sweep
    return [build_spec(cell) for cell in command.cells]
