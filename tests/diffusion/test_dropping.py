"""FastV, PyramidDrop and VisionZip at denoising steps, compared with the appendix written out and its cost model."""

from __future__ import annotations

import math

import pytest

from espalier.harness.cost.budget import Budget, BudgetError, frame_of
from espalier.harness.cost.facts import ModelFacts
from espalier.harness.decoding.diffusion.denoising_record import diffusion_block, verify_steps
from espalier.harness.decoding.diffusion.step_budgets import step_budgets
from espalier.methods.base import MethodError, TokenReducer
from espalier.methods.fastv import FastV
from espalier.methods.fastv_denoising import FastVDenoising
from espalier.methods.pyramiddrop import PyramidDrop
from espalier.methods.pyramiddrop_denoising import PyramidDropDenoising
from espalier.methods.random import Random
from espalier.methods.uniform import Uniform
from espalier.methods.visionzip import VisionZip
from lab.analytic.d3tom_formulas import PAPER
from tests.diffusion import dropping, models
from tests.diffusion.test_step import LENGTH, answering, plain, run
from tests.tiny import CHATS, model_of

#: The stages of the tiny model's five layers end before layers 1, 2 and 3.
STAGES = (1, 2, 3)


def half_up(value: float) -> int:
    return math.floor(value + 0.5 + 1e-9)


def places(adapter, chat, x) -> tuple[list[int], dict[str, list[int]]]:
    """Positions of visual tokens, and the places that may rank them by attention."""
    visual = adapter.layout(adapter.encode([chat])).visual[0].tolist()
    first = x.shape[1] - LENGTH
    unveiled = answering(1).deciders[0].nonzero()[:, 0].tolist()
    return visual, {
        "deciders": [first + place for place in unveiled],
        "last": [first - 1],
        "mean": list(range(x.shape[1])),
    }


@pytest.mark.sampled(18)
@pytest.mark.parametrize("queries", ["deciders", "last", "mean"])
@pytest.mark.parametrize("K", [1, 3])
def test_fastv_is_the_appendix_written_out(adapter, queries, K) -> None:
    method = FastVDenoising(K, queries)
    (budget,) = set(step_budgets(method, Budget("kept", 0.7), adapter.facts, 4)[1:])
    for chat in CHATS[:2]:
        x, _ = plain(adapter, [chat], answering(1))
        visual, ranking = places(adapter, chat, x)
        keep = half_up(0.3 * len(visual))
        expected, kept, entered = dropping.step(
            adapter.model, x[0].clone(), visual, LENGTH, ranking[queries], {K: keep}
        )
        logits, (record,) = run(adapter, method, budget, [chat])
        assert (record.origin.tolist(), list(record.entering)) == (kept, entered)
        assert (logits[0] - expected).abs().max() < 1e-9


@pytest.mark.parametrize("ratio", [0.5, 0.6])
def test_pyramiddrop_is_the_appendix_written_out(adapter, ratio) -> None:
    method, x = PyramidDropDenoising(), 1.5 * (1 - ratio)
    budgets = step_budgets(method, Budget("kept", ratio), adapter.facts, 4)
    assert len(set(budgets)) == 1  # the first step is as short as the others
    for chat in CHATS[:2]:
        states, _ = plain(adapter, [chat], answering(1))
        visual, ranking = places(adapter, chat, states)
        n = len(visual)
        drops = {
            layer: half_up(n * x**stage) for stage, layer in zip((1, 2, 3), STAGES, strict=True)
        }
        expected, kept, entered = dropping.step(
            adapter.model, states[0].clone(), visual, LENGTH, ranking["last"], drops
        )
        logits, (record,) = run(adapter, method, budgets[0], [chat])
        assert (record.origin.tolist(), list(record.entering)) == (kept, entered)
        assert (logits[0] - expected).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("method", "drops"),
    [(FastV(K=2), {2: 0.5}), (PyramidDrop(), {1: 0.5 ** (1 / 3), 2: 0.25 ** (1 / 3), 3: 0.5})],
)
def test_the_prompts_last_token_ranks_for_methods_of_a_prefill(adapter, method, drops) -> None:
    """Behind it stands the answer, whose last place says nothing yet."""
    chat = CHATS[0]
    x, _ = plain(adapter, [chat], answering(1))
    visual, ranking = places(adapter, chat, x)
    counts = {layer: half_up(share * len(visual)) for layer, share in drops.items()}
    expected, kept, _ = dropping.step(
        adapter.model, x[0].clone(), visual, LENGTH, ranking["last"], counts
    )
    logits, (record,) = run(adapter, method, Budget("kept", 0.5), [chat])
    assert record.origin.tolist() == kept
    assert (logits[0] - expected).abs().max() < 1e-9


def test_the_layer_behind_ranks_by_the_same_token(adapter) -> None:
    """What layer 1 pays before it runs, with every token left, is what it pays when it has run."""
    before = run(adapter, PyramidDrop(ranking="next_layer", layers=(1,)), Budget("kept", 0.5))[1]
    after = run(adapter, FastV(K=2), Budget("kept", 0.5))[1]
    for expected, computed in zip(before, after, strict=True):
        assert expected.origin.tolist() == computed.origin.tolist()


def test_visionzip_is_the_appendix_written_out(adapter, folder) -> None:
    """Merged before the decoder, once; each step sees the same tokens."""
    eager, chat, keep = models.load(folder, attention="eager"), CHATS[0], 8
    inputs = adapter.encode([chat])
    order, tokens = dropping.zipped(
        adapter.model, eager.model, inputs["pixel_values"].double(), keep
    )
    x, _ = plain(adapter, [chat], answering(1))
    visual = adapter.layout(inputs).visual[0].tolist()
    x = x[0].clone()
    for j, token in zip(order, tokens, strict=True):
        x[visual[j]] = token
    removed = {place for j, place in enumerate(visual) if j not in order}
    alive = [place for place in range(len(x)) if place not in removed]
    expected, _, entered = dropping.step(
        adapter.model, x[alive], [visual[j] for j in order], LENGTH, [], {}, alive
    )
    for number in (0, 3):
        answer = answering(1, number)
        logits, (record,) = run(adapter, VisionZip(), Budget("kept", 0.5), [chat], answer)
        assert record.origin.tolist() == order
        assert list(record.entering) == entered == [keep] * 5
        assert (logits[0] - expected).abs().max() < 1e-9


#: LLaDA 8B as the paper counts it: 1000 visual tokens, 128 others, 32 steps.


@pytest.fixture(scope="module")
def lavida() -> ModelFacts:
    return model_of("model=lavida_llada_8b", "model.weights=random").facts


@pytest.mark.parametrize("ratio", [0.5, 0.667, 0.75, 0.833, 0.9])
@pytest.mark.parametrize(
    ("method", "printed"),
    [
        (FastVDenoising(), lambda ratio: PAPER.pruning(ratio, 3)),
        (PyramidDropDenoising(), PAPER.pyramid),
        (VisionZip(), PAPER.before),
    ],
    ids=lambda case: type(case).__name__,
)
def test_layers_see_what_the_papers_count_has(lavida, method, printed, ratio) -> None:
    """Each of 32 steps and 32 layers sees the fraction of tokens that the cost model counts, to the nearest integer."""
    frame = frame_of(method, lavida, 1000, 128)
    total = limit = 0.0
    for budget in step_budgets(method, Budget("kept", ratio), lavida, PAPER.steps):
        entering = frame.entering(budget.keep(method, lavida, 1000, 128))
        total += sum(map(PAPER.layer, entering))
        # Half a token of rounding wherever anything has been dropped.
        limit += sum(PAPER.layer(n + 0.5) - PAPER.layer(n) for n in entering if n < 1000)
    assert abs(total - printed(ratio)) <= limit * 1.001 + 1


def test_what_a_ratio_means_to_stages(lavida) -> None:
    """At 0.9 each stage has 0.15 of the one before; neither the mean nor the last stage has a tenth."""
    method = PyramidDropDenoising()
    (budget,) = set(step_budgets(method, Budget("kept", 0.9), lavida, 32))
    kept = budget.keep(method, lavida, 1000, 128)
    assert kept == (150, 23, 3)
    assert (
        frame_of(method, lavida, 1000, 128).equivalent("average", kept) == (1000 + 150 + 23 + 3) / 4
    )


@pytest.mark.parametrize("ratio", [0.1, 1 / 3])
def test_stages_that_would_grow_are_refused(lavida, ratio) -> None:
    with pytest.raises(MethodError, match=r"excess=1\.5: 0, or 0\.3333 < ratio < 1"):
        step_budgets(PyramidDropDenoising(), Budget("kept", ratio), lavida, 4)


def test_nothing_goes_at_ratio_0(lavida) -> None:
    for method in (FastVDenoising(), PyramidDropDenoising()):
        budgets = step_budgets(method, Budget("kept", 0.0), lavida, 4)
        assert [budget.ratio for budget in budgets] == [0.0] * 4


@pytest.mark.parametrize(
    ("method", "rule", "valid"),
    [
        (FastVDenoising(), "flops", "valid: kept, average"),
        (PyramidDropDenoising(), "flops", "valid: kept"),
        (PyramidDropDenoising(), "average", "valid: kept"),
    ],
)
def test_rules_that_steps_or_stages_cannot_follow(lavida, method, rule, valid) -> None:
    with pytest.raises(BudgetError, match=f"budget='{rule}' cannot be followed") as error:
        step_budgets(method, Budget(rule, 0.5), lavida, 4)
    assert str(error.value).endswith(valid)


@pytest.mark.parametrize(
    ("method", "ratio", "kept"),
    [
        (Random(), 0.5, [8] * 4),
        (Uniform(), 0.5, [8] * 4),
        (FastV(K=2), 0.3, [8] * 4),  # (2 * 16 + 3 * 8) / 5 is nearest 0.7 * 16
        (FastVDenoising(K=2), 0.3, [16, 8, 8, 8]),
    ],
    ids=lambda case: type(case).__name__,
)
def test_an_average_is_told_of_each_step(adapter, method: TokenReducer, ratio, kept) -> None:
    budget = Budget("average", ratio)
    how = {"max_new_tokens": 4, "steps": 4}
    generated = models.denoised(adapter, method, chats=CHATS[:1], budget=budget, **how)
    (record,) = generated.records
    assert verify_steps(method, budget, adapter.facts, record)["average"] == pytest.approx(
        16 * (1 - ratio), abs=0.5
    )
    block = diffusion_block(generated.records)
    assert block["per_step"]["requested"] == block["per_step"]["kept"] == kept
    depth = method.sites(5)[0].layer
    layers = [(depth * 16 + (5 - depth) * count) / 5 for count in kept]
    assert block["per_step"]["layer_average"] == pytest.approx(layers)
    assert block["layer_average"] == pytest.approx(sum(layers) / 4)
    assert block["layer_average_behind_first"] == pytest.approx(sum(layers[1:]) / 3)
    assert [len(count) for count in record.origins] == kept
