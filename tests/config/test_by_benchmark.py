"""Table 1 of D3ToM as a preset: its cells, and the lengths of answers by benchmark."""

from __future__ import annotations

import csv

import pytest
from omegaconf import OmegaConf

from espalier.harness.config.build_spec import build_spec
from espalier.harness.errors import UserError
from espalier.harness.paths import CONF, ROOT
from espalier.harness.runs.admission import admit
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.digests import Digests
from tests import commands

PAPERS = ROOT / "results" / "papers"
TABLE_2 = PAPERS / "d3tom_table2.csv"
NAMES = OmegaConf.load(PAPERS / "d3tom.yaml").benchmarks
with (PAPERS / "d3tom_table4.csv").open() as lines:
    LENGTHS = {
        NAMES[row["benchmark"]].benchmark: int(row["value"]) for row in csv.DictReader(lines)
    }
PRESET = "+experiment=d3tom"


def specs_of(*argv: str) -> list[RunSpec]:
    return [build_spec(cell) for cell in commands.cells_of("-m", PRESET, *argv)]


def test_every_cell_composes_with_its_printed_length() -> None:
    """Of each benchmark one method, and of one benchmark every method and ratio."""
    specs = specs_of("method=d3tom_t", "ratio=0.9", "model.weights=random")
    assert {spec.model.name for spec in specs} == {"lavida_llada_8b"}
    assert {
        spec.benchmark.name: (spec.generation["max_new_tokens"], spec.generation["steps"])
        for spec in specs
    } == {name: (length, length // 2) for name, length in LENGTHS.items()}


def test_its_cells_are_admitted(tmp_path) -> None:
    specs = specs_of(
        "model.weights=random", f"store={tmp_path}", "benchmark=mathvision", "ratio=0.5"
    )
    digests = Digests()
    jobs = [admit(spec, digests) for spec in specs]
    assert [job.spec.method.name for job in jobs] == [
        *("none", "random", "uniform", "fastv_denoising", "pyramiddrop_denoising"),
        *("visionzip", "d3tom", "d3tom_t"),
    ]
    assert len({job.key for job in jobs}) == len(jobs)


def test_ratios_are_the_printed_shares() -> None:
    with TABLE_2.open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["method"] == "D3ToM-t"]
    kept = {round(float(row["budget"].partition("%")[0]) / 100, 3) for row in rows}
    preset = OmegaConf.load(CONF / "experiment" / "d3tom.yaml").hydra.sweeper.params
    assert {round(1 - float(ratio), 3) for ratio in preset.ratio.split(",")} == kept
    assert set(preset.benchmark.split(",")) == set(LENGTHS)


@pytest.mark.slow
def test_a_benchmark_without_a_length_is_one_line() -> None:
    with pytest.raises(UserError, match=r"benchmark='seedling_vqa' is none of those.*valid: mmmu"):
        specs_of("benchmark=seedling_vqa", "method=d3tom", "ratio=0.9")


def test_what_the_user_sets_counts() -> None:
    lengths = ("benchmark.generation.max_new_tokens=4", "benchmark.generation.steps=2")
    (spec,) = specs_of("benchmark=seedling_vqa", "method=d3tom", "ratio=0.9", *lengths)
    assert (spec.generation["max_new_tokens"], spec.generation["steps"]) == (4, 2)
