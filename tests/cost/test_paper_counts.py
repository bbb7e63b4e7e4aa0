"""Each paper's own count of a prefill, one layer by hand and the others from it, and of a denoising run.

Every figure of D3ToM's Tables 2 and 5 is in tests/tables/test_analytic.py.
"""

from __future__ import annotations

import pytest

from espalier.harness.cost.facts import ModelFacts, StackFacts, Work
from espalier.harness.cost.flops import PAPERS, d2pruner, d3tom, flops_block, rtprune, sample_flops
from espalier.methods.d3tom import D3ToM
from espalier.methods.d3tom_t import D3ToMT
from lab.analytic.d3tom_formulas import PAPER
from lab.analytic.denoising_cost import even, rising

#: DeepSeek-OCR's decoder: 6 experts of 896 and two shared ones a token, layer 0 dense.
OCR = StackFacts(12, 1280, 6 * 896 + 2 * 896, 10, 10, 128, True, True, 0, 6848, 64)

SMALL = StackFacts(2, 8, 24, 2, 1, 4, True, True)


def test_one_layer_by_hand() -> None:
    n, d, m = 5, 8, 24
    projections, pairs, matrix = 4 * n * d * d, 2 * n * n * d, n * d * m
    assert d2pruner(SMALL, [n]) == projections + pairs + 2 * matrix
    assert d3tom(SMALL, [n]) == projections + pairs + 3 * matrix
    assert rtprune(SMALL, [n]) == 2 * d3tom(SMALL, [n])  # FLOPs of the same multiply-adds


def test_layers_add_up_and_the_first_may_differ() -> None:
    for count in PAPERS.values():
        assert count(SMALL, [5, 3]) == count(SMALL, [5]) + count(SMALL, [3])
    n = 7
    later = rtprune(OCR, [n, n]) - rtprune(OCR, [n])
    assert later - rtprune(OCR, [n]) == 6 * n * 1280 * (7168 - 6848)


@pytest.mark.parametrize(
    ("tokens", "giga"),
    [
        *((283, 235.688), (219, 181.526), (240, 199.243)),
        *((431, 362.864), (331, 276.639), (367, 307.539)),
        *((83, 68.1), (121, 99.6)),
    ],
)
def test_deepseek_ocr_by_rtprunes_formula(tokens: int, giga: float) -> None:
    assert round(rtprune(OCR, [tokens] * 12) / 1e9, 3 if giga > 100 else 1) == giga


def test_a_row_of_deepseek_ocr_says_what_rtprune_prints() -> None:
    facts = ModelFacts(OCR, SMALL, None, (2048, 1280), 129280, 256, "token", 1, frozenset())
    # 256 cells, 16 newlines, a separator and ten words; 64 cells leave before layer 0.
    plain, pruned = (sample_flops(facts, (n,) * 12, 256, 27, Work()) for n in (256, 192))
    block = flops_block([plain])
    assert round(block["paper"]["rtprune"] / 1e9, 1) == 235.7
    assert round(block["prefill_paper"] / 1e9, 1) == 87.0
    block = flops_block([pruned])
    assert round(block["paper"]["rtprune"] / 1e9, 1) == 181.5
    assert round(block["paper_full"]["rtprune"] / 1e9, 1) == 235.7


#: LLaDA-8B, 64 tokens in 32 steps; sizes that the paper does not print are those that all its figures fit.


@pytest.mark.parametrize("ratio", [0.5, 0.667, 0.9])
def test_the_papers_shares_are_those_that_the_methods_take(ratio: float) -> None:
    assert even(ratio, 32) == pytest.approx(D3ToM().ratios(ratio, 32))
    assert rising(ratio, 32) == pytest.approx(D3ToMT().ratios(ratio, 32))
    assert sum(rising(ratio, 32)) == pytest.approx(31 * ratio)


def test_rising_shares_cost_what_equation_18_says() -> None:
    difference = PAPER.merging(rising(0.5, 32), 3) - PAPER.merging(even(0.5, 32), 3)
    spread = sum((share - 0.5) ** 2 for share in rising(0.5, 32)[1:])
    assert spread == pytest.approx(31 * 32 / (12 * 30))
    assert difference == pytest.approx(2 * 4096 * (32 - 3 - 2) * 1000**2 * spread)
    assert difference / 1e12 == pytest.approx(0.610, abs=1e-3)


def test_a_merging_step_without_a_share_is_a_whole_one() -> None:
    assert PAPER.merging((0.0,) * 32, 3) == PAPER.unreduced()
    assert PAPER.pruning(0.0, 3) == PAPER.before(0.0) == PAPER.unreduced()
