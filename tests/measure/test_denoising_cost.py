"""The paper's count of a denoising run against every figure of its Tables 2 and 5."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from harness.measure.denoising_cost import DenoisingCost
from methods.d3tom import D3ToM
from methods.d3tom_t import D3ToMT

FILE = Path(__file__).parent / "published" / "d3tom_tflops.csv"
with FILE.open() as lines:
    PRINTED = list(csv.DictReader(line for line in lines if not line.startswith("#")))

#: LLaDA-8B, 64 tokens in 32 steps; sizes that the paper does not print are those that all its figures fit.
PAPER = DenoisingCost(4096, 12288, 32, 32, 1000, 128)


def counted(row: dict[str, str]) -> float:
    ratio, K = 1 - float(row["keep"]), int(row["layer"] or 3)
    cost = {
        "LaViDa": PAPER.whole,
        "FastV": lambda: PAPER.pruning(ratio, K),
        "PDrop": lambda: PAPER.pyramid(ratio),
        "VisionZip": lambda: PAPER.before(ratio),
        "D3ToM": lambda: PAPER.merging(D3ToM(K).ratios(ratio, PAPER.steps), K),
        "D3ToM-t": lambda: PAPER.merging(D3ToMT(K).ratios(ratio, PAPER.steps), K),
    }
    return cost[row["method"]]() / 1e12


@pytest.mark.parametrize("row", PRINTED, ids=lambda row: "-".join(row.values()))
def test_the_count_is_the_printed_one(row) -> None:
    assert counted(row) == pytest.approx(float(row["tflops"]), abs=0.01)


def test_all_figures_of_both_tables_are_there() -> None:
    assert len([row for row in PRINTED if row["table"] == "2"]) == 26
    assert len([row for row in PRINTED if row["table"] == "5"]) == 11


def test_a_merging_step_without_a_share_is_a_whole_one() -> None:
    assert PAPER.merging((0.0,) * 32, 3) == PAPER.whole()
    assert PAPER.pruning(0.0, 3) == PAPER.before(0.0) == PAPER.whole()
