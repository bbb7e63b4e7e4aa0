"""AutoPrune against a slow version, by hand, on a model, and against what its released code measures and keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget, BudgetError, BudgetMismatch
from espalier.harness.engine.signals.decoder_attention import mutual_information
from espalier.methods.autoprune import AutoPrune, scaled
from espalier.methods.base import Need, Site, View
from tests.families import FAMILIES
from tests.family_runs import adapter_of, shown
from tests.methods.cases import facts_of, make_view
from tests.methods.released import numbers, released_view, shares
from tests.methods.runs import kept_by
from tests.methods.twins import best, check_method, outcome

FIRST, THIRD = Site("layer", 1), Site("layer", 3)


def attention_of(query: Tensor, key: Tensor) -> Tensor:
    """(H, S, S) causal attention of queries and keys (H, S, d) at scale one."""
    logits = query @ key.transpose(1, 2)
    hidden = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1)


def slope_of(method: AutoPrune, view: View) -> float:
    """The slope that the method measures in a view of one row."""
    curve = method.measured(view)
    assert curve == replace(method, slope=curve.slope)
    return curve.slope


def slow_bits(attention: Tensor) -> float:
    """Mutual information by head, word and token of (H, T, N)."""
    bits = 0.0
    for head in attention.tolist():
        n_words = len(head)
        for word in head:
            for token, share in enumerate(word):
                joint, mean = share / n_words, sum(row[token] for row in head) / n_words
                if joint:
                    bits += joint * math.log2(joint / (mean / n_words + 1e-6))
    return bits


# ---------------------------------------------------------------- mutual information


@pytest.mark.parametrize("block", [2, 256])
def test_information_equals_the_slow_one_in_any_batch(block: int) -> None:
    """Two words before the picture, 9 tokens with two of them dropped, and 4 or 3 words after it."""
    query, key = 2 * numbers(61, 1, 3, 15, 4), 2 * numbers(62, 1, 3, 15, 4)
    visual = torch.zeros(1, 15, dtype=torch.bool)
    visual[0, [2, 3, 4, 6, 7, 8, 10]] = True
    valid = torch.ones(1, 15, dtype=torch.bool)
    words = torch.tensor([[11, 12, 13, 14]])
    alone = mutual_information(query, key, 1.0, valid, words, visual, block=block)
    expected = slow_bits(attention_of(query[0], key[0])[:, 11:, visual[0]])
    assert alone.item() == pytest.approx(expected, abs=1e-5)
    assert expected > 0.1
    # A shorter row: left-padded by one slot.
    pairs = [
        torch.cat([part, torch.cat([part[:, :, :1], part[:, :, :-1]], dim=2)])
        for part in (query, key)
    ]
    valid, shifted = valid.repeat(2, 1), torch.cat([visual, visual.roll(1, dims=1)])
    valid[1, 0] = False
    both = mutual_information(
        *pairs, 1.0, valid, torch.tensor([[11, 12, 13, 14], [12, 13, 14, -1]]), shifted
    )
    assert both[0].item() == pytest.approx(alone.item(), abs=1e-6)
    fewer = slow_bits(attention_of(query[0, :, :14], key[0, :, :14])[:, 11:, visual[0, :14]])
    assert both[1].item() == pytest.approx(fewer, abs=1e-5)


def test_the_engine_reads_words_after_the_image_and_tokens_left() -> None:
    """Against the attention of the layer's own queries and keys, before layer 2 with half of the tokens gone."""
    adapter, chats = adapter_of("llava"), FAMILIES["llava"].chats
    names = ("text_information", "text_queries", "text_keys", "visual_keys", "text_positions")
    needs = tuple(map(Need, (*names, "visual_positions", "all_positions")))
    for chat in chats:
        views = shown(adapter, (FIRST, Site("layer", 2)), needs, [chat], 0.5)
        for view, layer in zip(views, adapter.decoder.layers, strict=False):
            signals = {key: value[0].double() for key, value in view.signals.items()}
            places = torch.cat([signals["visual_positions"], signals["text_positions"]])
            keys = torch.cat([signals["visual_keys"], signals["text_keys"]], dim=1)
            queries = signals["text_queries"]
            keys = keys.repeat_interleave(len(queries) // len(keys), dim=0)
            logits = queries @ keys.transpose(1, 2) * layer.self_attn.scaling
            hidden = places > signals["text_positions"][:, None]
            attention = logits.masked_fill(hidden, -torch.inf).softmax(-1)
            after = signals["text_positions"] > signals["all_positions"].max()
            rows = attention[:, after, : view.tokens.shape[1]]
            assert signals["text_information"].item() == pytest.approx(slow_bits(rows), abs=1e-5)
    assert view.site.layer == 2


# ---------------------------------------------------------------- curve and budget


@pytest.mark.parametrize("total", [0.5, 2.0, 4.0, 5.999, 6.0])
def test_a_curve_meets_its_sum_and_keeps_its_form(total: float) -> None:
    curve = [0.9, 0.7, 0.4, 0.2, 0.1, 0.01]
    parts = scaled(curve, total)
    assert sum(parts) == pytest.approx(total)
    assert all(1 >= a >= b >= 0 for a, b in pairwise(parts))
    factors = {round(b / a, 9) for a, b in zip(curve, parts, strict=True) if b < 1}
    assert len(factors) <= 1


@pytest.mark.parametrize(("tokens", "ratio"), [(64, 0.8577), (128, 0.7466), (192, 0.6355)])
def test_the_released_budgets(tokens: int, ratio: float) -> None:
    shares_left = AutoPrune().fractions(tokens / 576, 31)
    assert 1 - (1 + sum(shares_left)) / 32 == pytest.approx(ratio, abs=5e-5)
    assert Budget("average", ratio).keep(AutoPrune(), facts_of(32), 576, 60)[0] == int(2.5 * tokens)


@pytest.mark.sampled
@pytest.mark.parametrize("rule", ["kept", "average", "flops"])
@pytest.mark.parametrize("layers", [3, 4, 8, 32])
def test_any_slope_meets_the_budget_after_the_first_count(rule: str, layers: int) -> None:
    """Every slope from the first count on; a flat curve keeps less of early layers than a steep one."""
    facts = facts_of(layers)
    for n_tokens in (5, 144, 577):
        for ratio in (0.02, 0.3, 0.6, 0.7):
            budget = Budget(rule, ratio)
            try:
                usual = budget.keep(AutoPrune(), facts, n_tokens, 40)
            except BudgetError:
                assert layers in (3, 4)
                assert ratio in (0.6, 0.7)
                continue
            assert len(usual) == layers - 1
            for slope in (0.0, 0.02, 0.15, 0.4, 1.0):
                counts = budget.keep(AutoPrune(slope=slope), facts, n_tokens, 40, usual[:1])
                assert counts[0] == usual[0]
                assert all(a >= b >= 1 for a, b in pairwise((n_tokens, *counts)))
                achieved = budget.verify(AutoPrune(), facts, Counted(n_tokens, counts))
                assert abs(getattr(achieved, rule) - (1 - ratio) * n_tokens) <= 1
    steep, flat = (
        Budget("average", 0.7).keep(AutoPrune(slope=slope), facts_of(32), 576, 40, (384,))
        for slope in (0.4, 0.05)
    )
    assert steep[1] > flat[1]
    assert steep[-1] < flat[-1]


class Counted:
    """A finished sample with these counts."""

    def __init__(self, visual: int, kept: tuple[int, ...]) -> None:
        self.sample, self.visual, self.text, self.items = "a", visual, 40, None
        self.kept, self.entering = kept, (visual, *kept)


def test_a_curve_that_misses_the_budget_is_an_error() -> None:
    counts = Budget("average", 0.5).keep(AutoPrune(), facts_of(8), 144, 40)
    off = (*counts[:2], *(count - 4 for count in counts[2:]))
    with pytest.raises(BudgetMismatch, match=r"equivalent tokens, asked for 72\.000"):
        Budget("average", 0.5).verify(AutoPrune(), facts_of(8), Counted(144, off))
    # A slope for all samples has one schedule.
    flat = Budget("average", 0.5).keep(AutoPrune(slope=0.0), facts_of(8), 144, 40)
    Budget("average", 0.5).verify(AutoPrune(), facts_of(8), Counted(144, flat))
    with pytest.raises(BudgetMismatch, match="requested"):
        Budget("average", 0.5).verify(AutoPrune(slope=1.0, x0=4.0), facts_of(8), Counted(144, flat))


# ---------------------------------------------------------------- choices


def test_before_layer_1_by_hand() -> None:
    """Two words after the image see token 0 half and token 1 all; 2 bits weigh them 0.3 * 2 / 2."""
    view = released_view(
        FIRST,
        numbers(1, 1, 3, 4),
        3,
        text_attention=torch.tensor([[[9.0, 9, 9], [1, 1, 0], [0, 1, 0]]]),
        text_positions=torch.tensor([[0, 4, 5]]),
        all_positions=torch.tensor([[1, 2, 3]]),
        text_information=torch.tensor([[2.0]]),
        cls_attention=torch.tensor([[0.1, 0.0, 0.2]]),
    )
    plan = AutoPrune().plan(view, 2)
    torch.testing.assert_close(plan.scores, torch.tensor([[0.25, 0.3, 0.2]]))
    assert (plan.kept.tolist(), plan.merge) == ([[0, 1]], None)
    assert AutoPrune(words=0.0).plan(view, 2).kept.tolist() == [[0, 2]]


def slow_autoprune(method: AutoPrune, view: View, row: int, keep: int) -> list[int]:
    """Word by word, without clusters."""
    signals = {key: value[row].double() for key, value in view.signals.items()}
    words = [
        attention
        for attention, place in zip(
            signals["text_attention"], signals["text_positions"], strict=True
        )
        if place > signals["all_positions"].max()
    ]
    score = sum(words) / len(words)
    if view.site == FIRST:
        bits = signals["text_information"][0] / len(words)
        score = signals["cls_attention"] + method.words * bits * score
    return best(score.tolist(), keep)


def test_the_slope_is_measured_before_layer_2_alone() -> None:
    view = make_view(AutoPrune(), [((0, 0, 6, 8),)], site=Site("layer", 2))
    for bits, slope in ((0.0, 0.4), (0.5, 0.3), (9.0, 0.0)):
        bits_view = replace(
            view, signals={**view.signals, "text_information": torch.tensor([[bits]])}
        )
        assert slope_of(AutoPrune(), bits_view) == pytest.approx(slope)
    assert AutoPrune().measured(make_view(AutoPrune(), site=FIRST)) is None
    assert AutoPrune().measured(make_view(AutoPrune(), site=THIRD)) is None


def released_autoprune(case: dict[str, Any]) -> None:
    """Counts of 32 layers may differ by 3, because clusters come on top of the released ones."""
    seed, n_tokens, n_words = case["seed"], case["tokens"], case["words"]
    heads = numbers(seed, 2, 4, n_tokens + n_words, 8)
    query, key = case["scale"] * heads[0], 2 * heads[1]
    valid = torch.ones(1, n_tokens + n_words, dtype=torch.bool)
    visual = valid.clone()
    visual[:, n_tokens:] = False
    words = torch.arange(n_tokens, n_tokens + n_words)[None]
    bits = mutual_information(query[None], key[None], 1.0, valid, words, visual)
    assert bits.item() == pytest.approx(case["bits"], abs=1e-4)

    places = torch.arange(n_tokens)[None]
    attention = attention_of(query, key)[None, :, n_tokens:, :n_tokens].mean(dim=1)
    signals = {"text_attention": attention, "text_positions": words, "all_positions": places}
    signals |= {
        "text_information": bits,
        "cls_attention": shares(seed + 100, 1, n_tokens) / n_tokens,
    }
    tokens = numbers(seed + 200, 1, n_tokens, 8)
    first = AutoPrune().plan(released_view(FIRST, tokens, 16, **signals), case["first"])
    assert first.kept[0].tolist() == case["first_kept"]

    slope = slope_of(AutoPrune(), released_view(Site("layer", 2), tokens, 16, **signals))
    assert slope == pytest.approx(case["slope"], abs=1e-4)
    counts = [576 * part for part in AutoPrune(slope=slope).fractions(case["target"] / 576, 31)]
    assert counts[0] == pytest.approx(case["counts"][0])
    for count, wanted in zip(counts[1:], case["counts"][1:-1], strict=True):
        assert count == pytest.approx(wanted, abs=3)

    later = AutoPrune().plan(released_view(THIRD, tokens, 16, **signals), case["keep"])
    assert set(case["kept"]) <= set(later.kept[0].tolist())
    merged = outcome(released_view(THIRD, tokens, 16, **signals), later)[0].double().sum(dim=1)
    rest = [
        place for place, token in enumerate(later.kept[0].tolist()) if token not in case["kept"]
    ]
    assert sorted(merged[rest].tolist()) == pytest.approx(case["sums"], abs=2e-4)


test_autoprune = check_method(
    "autoprune",
    slow_autoprune,
    settings=({"tau": 0.0, "words": 2.0},),
    views=lambda method, keep, layer: make_view(method, seed=keep, site=Site("layer", layer)),
    varied=(FIRST.layer, THIRD.layer),
    keeps=(1, 5, 24, 47),
    released=released_autoprune,
)


# ---------------------------------------------------------------- on models


#: A slope that a little information makes flat, as on tiny models.
GAMMA = 20.0


@pytest.mark.parametrize("rule", ["average", "flops"])
def test_samples_of_a_model_have_curves_of_their_own(rule: str) -> None:
    """The counts of each sample are those of its slope by what layer 1 shows, in a batch as alone."""
    adapter, chats = adapter_of("llava"), FAMILIES["llava"].chats
    method = AutoPrune(gamma=GAMMA, k0=1.0, x0=2.0)
    batch = kept_by(adapter, method, chats, 0.5, "abc", rule=rule)
    usual = kept_by(adapter, replace(method, slope=method.k0), chats, 0.5, "abc", rule=rule)
    views: list[View] = []

    class RecordedAutoPrune(AutoPrune):
        def measured(self, view: View) -> AutoPrune | None:
            views.append(view)
            return super().measured(view)

    kept_by(adapter, RecordedAutoPrune(gamma=GAMMA, k0=1.0, x0=2.0), chats, 0.5, "abc", rule=rule)
    early = [view for view in views if view.site.layer == 2]
    assert len(early) == len(chats)
    budget = Budget(rule, 0.5)
    for row, record in enumerate(batch.records):
        slope = method.measured(early[row])
        counts = budget.keep(slope, adapter.facts, record.visual, record.text, record.kept[:1])
        assert record.kept == record.requested == counts
        assert record.kept[0] == usual.records[row].kept[0]
        achieved = budget.verify(method, adapter.facts, record)
        assert abs(getattr(achieved, rule) - 0.5 * record.visual) <= 1
        alone = kept_by(adapter, method, [chats[row]], 0.5, "abc"[row], rule=rule)
        assert alone.records[0].kept == record.kept
    assert any(a.kept != b.kept for a, b in zip(batch.records, usual.records, strict=True))
