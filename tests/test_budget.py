"""Budgets: integers that meet each rule, bounds, reachability, and the check of a run's kept tokens."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from espalier.harness.cost.budget import (
    NOMINAL_TEXT,
    RULES,
    Budget,
    BudgetError,
    BudgetMismatch,
    equivalent_tokens,
    frame_of,
)
from espalier.harness.cost.facts import ModelFacts, StackFacts
from espalier.harness.cost.flops import text_flops
from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT
from espalier.methods.base import Plan, Site, TokenReducer, View

# No deadline: these tests say nothing about speed, and machines are shared.
THOROUGH = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@dataclass(frozen=True)
class At(TokenReducer):
    """Acts at given sites and keeps the same share from the first on."""

    places: tuple[Site, ...] = (Site("prefix"),)

    def sites(self, depth: int) -> tuple[Site, ...]:
        return self.places

    def plan(self, view: View, keep: int) -> Plan:
        raise NotImplementedError


@dataclass(frozen=True)
class Pyramid(At):
    """Keeps `share`, `share`^2, `share`^3, ... of the original tokens."""

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        return tuple(share ** (i + 1) for i in range(n_sites))


@dataclass(frozen=True)
class Floored(At):
    """Never keeps fewer than a quarter after its first site."""

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        return (max(share, 0.25), *(share,) * (n_sites - 1))


@dataclass(frozen=True)
class Count:
    sample: str
    visual: int
    text: int
    kept: tuple[int, ...]
    entering: tuple[int, ...]
    items: tuple[int, ...] | None = None


def facts_of(layers: int, kv_heads: int = 8, n_visual: int = 576) -> ModelFacts:
    text = StackFacts(layers, 64, 160, 8, kv_heads, 8, gated=True, causal=True)
    tower = StackFacts(3, 32, 64, 4, 4, 8, gated=False, causal=False)
    return ModelFacts(text, tower, None, (8, 8), 100, n_visual, "token", 1, frozenset())


def layers(*where: int) -> tuple[Site, ...]:
    return tuple(Site("layer", layer) for layer in where)


FACTS = facts_of(32)
PREFIX = At()


# Worked values: k = (L k_avg - l N) / (L - l) with N = 576, L = 32, rounded half up.
@pytest.mark.parametrize(
    ("layer", "average", "keep"),
    [(2, 192, 166), (2, 128, 98), (2, 64, 30), (3, 192, 152), (3, 128, 82), (3, 64, 11)],
)
def test_average_rule_of_one_layer_site(layer: int, average: int, keep: int) -> None:
    assert Budget("average", 1 - average / 576).keep(At(layers(layer)), FACTS, 576, 40) == (keep,)


@pytest.mark.parametrize(
    ("n", "ratio", "keep"),
    [(15, 0.9, 2), (5, 0.9, 1), (145, 0.5, 73), (144, 0.75, 36), (144, 0.999, 1), (1, 0.4, 1)],
)
def test_decimal_halves_round_up_and_one_token_always_stays(
    n: int, ratio: float, keep: int
) -> None:
    assert Budget("kept", ratio).keep(PREFIX, FACTS, n, 3) == (keep,)


def test_pyramid_meets_an_average_computed_by_hand() -> None:
    # s + s^2 = 0.75 - ... : 4 layers of 100, 4 of 100 s, 4 of 100 s^2, mean 58.333 -> s = 1/2.
    budget = Budget("average", 1 - (100 + 50 + 25) / 300)
    assert budget.keep(Pyramid(layers(4, 8)), facts_of(12), 100, 9) == (50, 25)


def test_earlier_sites_move_when_the_last_is_at_its_bound() -> None:
    # A flat 900.3 would round to (900, 900), 0.30 off; one more before and one less after is 0.12 off.
    budget = Budget("average", 1 - 900.3 / 1142)
    assert budget.keep(At(layers(0, 10)), facts_of(17), 1142, 0) == (901, 899)


@pytest.mark.parametrize("rule", RULES)
def test_ratio_zero_keeps_everything(rule: str) -> None:
    for method in (PREFIX, At(layers(3)), Pyramid(layers(4, 8, 16)), Floored(layers(1, 2))):
        assert Budget(rule, 0).keep(method, FACTS, 577, 20) == (577,) * len(method.places)


@pytest.mark.parametrize("rule", RULES)
def test_without_sites_or_without_tokens_there_is_nothing_to_keep(rule: str) -> None:
    assert Budget(rule, 0.5).keep(At(()), FACTS, 576, 20) == ()
    assert Budget(rule, 0.5).keep(At(layers(2)), FACTS, 0, 20) == (0,)


@pytest.mark.slow
@THOROUGH
@given(n=st.integers(1, 3000), text=st.integers(0, 300), ratio=st.floats(0, 0.999))
def test_before_layer_0_all_rules_agree(n: int, text: int, ratio: float) -> None:
    for site in (Site("vision"), Site("prefix"), Site("layer", 0)):
        assert len({Budget(r, ratio).keep(At((site,)), FACTS, n, text) for r in RULES}) == 1


@THOROUGH
@given(n=st.integers(1, 3000), ratio=st.decimals(0, "0.99", places=2))
def test_kept_rule_is_the_exact_rounded_share_at_any_site(n: int, ratio) -> None:
    exact = max(1, math.floor((1 - ratio) * n + type(ratio)("0.5")))
    for method in (PREFIX, At(layers(7)), Pyramid(layers(4, 8, 16))):
        assert Budget("kept", float(ratio)).keep(method, FACTS, n, 5)[-1] == exact


@st.composite
def cases(draw: st.DrawFn) -> tuple[At, ModelFacts, int, int]:
    """A method with one to four sites, a model, and the token counts of a sample."""
    depth = draw(st.integers(4, 40))
    where = sorted(draw(st.lists(st.integers(0, depth - 1), min_size=1, max_size=4)))
    kind = draw(st.sampled_from([At, Pyramid, Floored]))
    facts = facts_of(depth, kv_heads=draw(st.sampled_from([2, 8])))
    return kind(layers(*where)), facts, draw(st.integers(1, 2000)), draw(st.integers(0, 200))


@THOROUGH
@given(case=cases(), rule=st.sampled_from(RULES), ratio=st.floats(0.001, 0.999))
def test_schedules_are_bounded_ordered_and_the_nearest_to_the_rule(
    case, rule: str, ratio: float
) -> None:
    method, facts, n, text = case
    try:
        kept = Budget(rule, ratio).keep(method, facts, n, text)
    except BudgetError:
        return

    def miss(last: int) -> float:
        tokens = getattr(equivalent_tokens(method, facts, n, text, (*kept[:-1], last)), rule)
        return abs(tokens - (1 - ratio) * n)

    assert len(kept) == len(method.places)
    assert all(isinstance(count, int) and 1 <= count <= n for count in kept)
    assert list(kept) == sorted(kept, reverse=True)
    assert miss(kept[-1]) <= 1 + 1e-9
    above = kept[-2] if len(kept) > 1 else n
    neighbours = {max(1, kept[-1] - 1), min(above, kept[-1] + 1)}
    assert all(miss(kept[-1]) <= miss(neighbour) + 1e-6 for neighbour in neighbours)


@THOROUGH
@given(
    case=cases(),
    rule=st.sampled_from(RULES),
    ratios=st.lists(st.floats(0, 0.999), min_size=2, max_size=2).map(sorted),
)
def test_a_larger_ratio_keeps_no_more_equivalent_tokens(case, rule: str, ratios) -> None:
    method, facts, n, text = case
    low, high = ratios
    try:
        more = Budget(rule, low).keep(method, facts, n, text)
        less = Budget(rule, high).keep(method, facts, n, text)
    except BudgetError:
        return
    values = [getattr(equivalent_tokens(method, facts, n, text, k), rule) for k in (more, less)]
    assert values[1] <= values[0] + 1
    if len(more) == 1:
        assert less[0] <= more[0]


@THOROUGH
@given(n=st.integers(50, 2000), text=st.integers(0, 200), ratio=st.floats(0.05, 0.75))
def test_flops_rule_costs_what_dropping_before_layer_0_costs(
    n: int, text: int, ratio: float
) -> None:
    method, facts = At(layers(3)), facts_of(32, kv_heads=2)
    (keep,) = Budget("flops", ratio).keep(method, facts, n, text)
    target = Budget("kept", ratio).keep(PREFIX, facts, n, text)[0]
    spent = text_flops(facts, (n,) * 3 + (keep,) * 29, text)
    assert text_flops(facts, (target - 1,) * 32, text) < spent
    assert spent < text_flops(facts, (target + 1,) * 32, text)
    assert keep <= target


@pytest.mark.parametrize("places", [(1,), (1, 3), (2, 3)])
def test_flops_rule_counts_a_dense_first_layer_where_it_is(places: tuple[int, ...]) -> None:
    """Layer 0 may be six times as wide as an expert: it must cost that once, and nowhere else."""
    plain = facts_of(4, kv_heads=2)
    text = replace(plain.text, first_intermediate=6 * plain.text.intermediate, experts=8)
    facts, method = replace(plain, text=text), At(layers(*places))
    n, words = 400, 30
    counts = {}
    for model_facts in (plain, facts):
        kept = Budget("flops", 0.1).keep(method, model_facts, n, words)
        entering, alive = [], n
        for layer in range(4):
            alive = kept[places.index(layer)] if layer in places else alive
            entering.append(alive)
        spent = text_flops(model_facts, entering, words)
        (target,) = Budget("kept", 0.1).keep(PREFIX, model_facts, n, words)
        assert text_flops(model_facts, (target - 2,) * 4, words) < spent
        assert spent < text_flops(model_facts, (target + 2,) * 4, words)
        reached = equivalent_tokens(method, model_facts, n, words, kept).flops
        assert reached == pytest.approx(target, abs=2)
        counts[model_facts is facts] = kept
    assert counts[True] != counts[False]


def test_unreachable_budget_names_the_reachable_range_before_any_sample() -> None:
    method, facts = At(layers(4)), facts_of(32)
    with pytest.raises(
        BudgetError, match=r"^ratio=0\.9 .*budget=average.*0 <= ratio < 0\.875 "
    ) as e:
        Budget("average", 0.9).check(method, facts)
    assert isinstance(e.value, UserError)
    assert f"576 visual and {NOMINAL_TEXT} text" in str(e.value)
    Budget("average", 0.87).check(method, facts)
    with pytest.raises(BudgetError, match="budget=flops"):
        Budget("flops", 0.9).check(method, facts)
    Budget("kept", 0.9).check(method, facts)


def test_the_stated_range_is_the_real_one() -> None:
    method = At(layers(5))
    with pytest.raises(BudgetError) as error:
        Budget("flops", 0.99).keep(method, FACTS, 576, 33)
    edge = float(str(error.value).split("ratio < ")[1].split()[0])
    assert Budget("flops", edge - 1e-4).keep(method, FACTS, 576, 33)[0] <= 2
    with pytest.raises(BudgetError):
        Budget("flops", edge + 2e-4).keep(method, FACTS, 576, 33)


@pytest.mark.parametrize(
    ("rule", "ratio", "count", "line"),
    [
        *(
            ("kept", ratio, None, r"^ratio=.*0 <= ratio < 1$")
            for ratio in (-0.1, 1.001, 1.5, math.nan, math.inf, "0.5", None, True, [0.5])
        ),
        *(
            ("kept", 0.5, count, r"^keep=.* valid: 1 and more$")
            for count in (0, -3, 6.5, "64", True, math.nan)
        ),
        ("keep", 0.5, None, r"'keep'.*kept.*average, flops, kept"),
    ],
)
def test_what_is_no_budget_is_refused_in_one_line(
    rule: str, ratio: Any, count: Any, line: str
) -> None:
    with pytest.raises(BudgetError, match=line):
        Budget(rule, ratio, count)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ratio", [1, 1.0])
def test_no_method_drops_every_token(rule: str, ratio: float) -> None:
    budget = Budget(rule, ratio)
    for n_visual in (576, 0):
        with pytest.raises(BudgetError, match=r"^ratio=1 is out of range; valid: 0 <= ratio < 1$"):
            budget.keep(PREFIX, FACTS, n_visual, 3)
    assert budget.keep(At(()), FACTS, 576, 3) == ()


@pytest.mark.parametrize(
    ("n", "ratio", "keep"),
    [(60, 0.9, 6), (15, 0.9, 2), (3, 0.9, 1), (144, 0, 144), (144, 1, 0), (0, 0.5, 0)],
)
def test_what_a_draft_sees_is_the_rounded_share(n: int, ratio: float, keep: int) -> None:
    assert Budget("kept", ratio).draft_keep(n) == keep


def record(method: At, budget: Budget, n: int = 144, text: int = 20) -> Count:
    kept = budget.keep(method, FACTS, n, text)
    first = method.places[0].layer
    return Count("vqa:7", n, text, kept, (n,) * first + (kept[0],) * (32 - first))


@pytest.mark.parametrize("rule", RULES)
def test_verify_accepts_the_budget_s_counts_and_reports_all_rules(rule: str) -> None:
    method, budget = At(layers(2)), Budget(rule, 0.75)
    done = record(method, budget)
    result = budget.verify(method, FACTS, done)
    assert result.kept == done.kept[-1]
    assert result.average == pytest.approx(sum(done.entering) / 32)
    assert abs(getattr(result, rule) - 36) <= 0.5


def test_verify_refuses_wrong_counts_and_layers_that_saw_more() -> None:
    method, budget = At(layers(2)), Budget("kept", 0.75)
    good = record(method, budget)
    lazy = replace(good, entering=(144,) * 32)
    with pytest.raises(BudgetMismatch, match=r"vqa:7.*144x32.*144x2 36x30"):
        budget.verify(method, FACTS, lazy)
    greedy = replace(good, kept=(37,), entering=(144,) * 2 + (37,) * 30)
    with pytest.raises(BudgetMismatch, match=r"kept \(37,\), requested \(36,\)"):
        budget.verify(method, FACTS, greedy)
    with pytest.raises(BudgetMismatch, match="0 counts for 1 sites"):
        budget.verify(method, FACTS, replace(good, kept=()))
    assert not issubclass(BudgetMismatch, UserError)


def test_adaptive_methods_may_keep_another_count_but_not_misreport_it() -> None:
    @dataclass(frozen=True)
    class Adaptive(At):
        adaptive = True

    method, budget = Adaptive(layers(2)), Budget("kept", 0.75)
    other = Count("a", 144, 20, (50,), (144,) * 2 + (50,) * 30)
    assert budget.verify(method, FACTS, other).kept == 50
    with pytest.raises(BudgetMismatch):
        budget.verify(method, FACTS, replace(other, entering=(144,) * 32))


def test_the_group_offers_exactly_the_rules() -> None:
    group = ROOT / "conf" / "budget"
    rules = {path.stem: yaml.safe_load(path.read_text())["rule"] for path in group.glob("*.yaml")}
    assert rules == {rule: rule for rule in RULES}


# ------------------------------------------------------------------ a count of tokens


@THOROUGH
@given(n=st.integers(0, 3000), count=st.integers(1, 3500), text=st.integers(0, 300))
def test_a_count_keeps_that_many_or_all(n: int, count: int, text: int) -> None:
    budget = Budget.of_count("kept", count, FACTS)
    for method in (PREFIX, At(layers(7)), Pyramid(layers(4, 8, 16)), Floored(layers(1, 2))):
        kept = budget.keep(method, FACTS, n, text)
        assert (kept[-1], sorted(kept, reverse=True)) == (min(count, n), list(kept))
    assert (budget.draft_keep(n), budget.clips(n)) == (min(count, n), 0 < n < count)


@THOROUGH
@given(n=st.integers(1, 3000), count=st.integers(1, 3500), rule=st.sampled_from(RULES))
def test_a_count_is_what_its_rule_counts(n: int, count: int, rule: str) -> None:
    budget = Budget.of_count(rule, count, FACTS)
    for method in (PREFIX, At(layers(2)), Pyramid(layers(4, 8, 16))):
        try:
            kept = budget.keep(method, FACTS, n, 30)
        except BudgetError as error:
            low, high = map(int, re.findall(r"reaches (\d+) <= keep <= (\d+) ", str(error))[0])
            assert not low <= count <= high
            assert budget.rule != "kept"
            continue
        reached = equivalent_tokens(method, FACTS, n, 30, kept)
        assert abs(getattr(reached, rule) - min(count, n)) <= 1 + 1e-9
        entering = frame_of(method, FACTS, n, 30).entering(kept)
        assert budget.verify(method, FACTS, Count("a", n, 30, kept, entering)) == reached


def test_a_count_of_a_share_is_the_run_of_its_ratio() -> None:
    for places in ((), layers(0), layers(3), layers(4, 8)):
        for rule in RULES:
            by_count = Budget.of_count(rule, 192, FACTS).keep(At(places), FACTS, 576, 40)
            assert by_count == Budget(rule, 1 - 192 / 576).keep(At(places), FACTS, 576, 40)


def test_the_nominal_ratio_of_a_count_is_that_of_a_usual_picture() -> None:
    budgets = [Budget.of_count("kept", count, FACTS) for count in (64, 576, 100_000)]
    assert [budget.ratio for budget in budgets] == [1 - 64 / 576, 0, 0]
    assert [budget.amount for budget in budgets] == ["64 tokens", "576 tokens", "100000 tokens"]
    # Larger pictures are pruned all the same.
    assert budgets[1].keep(PREFIX, FACTS, 2880, 40) == (576,)
    assert budgets[1].acts


def test_a_sample_with_another_count_is_a_mismatch() -> None:
    budget = Budget.of_count("kept", 64, FACTS)
    with pytest.raises(
        BudgetMismatch, match=r"budget kept, 64 tokens: kept \(63,\), requested \(64,\)"
    ):
        budget.verify(PREFIX, FACTS, Count("a", 576, 40, (63,), (63,) * 32))
