"""The count by D3ToM's formula in a row of denoised answers equals D3ToM's cost of the run."""

from __future__ import annotations

from statistics import fmean

import pytest

from espalier.harness.cost.facts import ModelFacts, StackFacts
from espalier.harness.decoding.diffusion.answer_flops import run_flops
from espalier.harness.decoding.diffusion.denoising_record import DenoisingRecord
from espalier.harness.engine.record import SampleRecord
from espalier.methods.d3tom import D3ToM
from espalier.methods.fastv import FastV
from lab.analytic.denoising_cost import DenoisingCost

TEXT = StackFacts(6, 64, 176, 8, 8, 8, gated=True, causal=False)
FACTS = ModelFacts(TEXT, TEXT, None, (48, 64), 211, 40, "token", 1, frozenset())
VISUAL, PROMPT, LENGTH, STEPS = 40, 6, 8, 4


def run(kept: tuple[tuple[int, ...], ...]) -> SampleRecord:
    denoising = DenoisingRecord(LENGTH, (2,) * STEPS, kept, kept, (fmean((VISUAL,)),) * STEPS)
    return SampleRecord(
        *("0", VISUAL, PROMPT, (), kept[-1], (VISUAL,) * 6, 0, 0, LENGTH),
        denoising=denoising.entry(),
    )


COST = DenoisingCost(64, 176, 6, STEPS, VISUAL, PROMPT + LENGTH)


@pytest.mark.parametrize("K", [0, 3])
def test_merging_inside_a_layer(K: int) -> None:
    flops = run_flops(D3ToM(K), FACTS, run(((VISUAL,), (10,), (10,), (10,))))
    assert flops.paper["d3tom"] == pytest.approx(COST.merging((0.0, 0.75, 0.75, 0.75), K))
    assert flops.paper_full["d3tom"] == pytest.approx(COST.unreduced())
    assert flops.paper["rtprune"] > 2 * flops.paper["d3tom"]  # whose MLP of layer K is whole


def test_dropping_before_a_layer() -> None:
    flops = run_flops(FastV(2), FACTS, run(((VISUAL,), (10,), (10,), (10,))))
    assert flops.paper["d3tom"] == pytest.approx(COST.pruning(0.75, 2))
