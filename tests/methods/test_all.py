"""The contract that every method keeps, whatever it does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any, get_args

import pytest
import torch

from espalier.harness.specs.catalogue import names_of
from espalier.methods.base import MethodError, PlanError, Positions, TokenReducer, View
from tests.methods.cases import (
    BLOCKS,
    CASES,
    CHAINED,
    DEPTH,
    ORDER,
    SHARES,
    WORDS,
    build,
    case_id,
    make_view,
    permuted,
    reachable,
    replaced,
    rows_of_view,
    views_of_sites,
    with_trait,
)
from tests.methods.twins import outcome

every_method = pytest.mark.parametrize("case", CASES, ids=case_id)
Case = tuple[str, dict[str, Any]]

#: What released code does with positions where it is not what most do: kept before the decoder, closed up between its
#: layers.
RELEASED = {
    **dict.fromkeys(("nuwa", "rtprune", "evs"), "original"),
    **dict.fromkeys(
        ("pyramiddrop", "sparsevlm", "vscan", "holitom", "prunevid", "sttm", "autoprune"),
        "renumbered",
    ),
}
#: Methods whose choice follows the tokens wherever they stand in the sequence.
FOLLOWS_TOKENS = [case for case in CASES if case not in with_trait(ORDER)]
#: Of these, the ones that take equal tokens from the front.
FROM_THE_FRONT = [case for case in FOLLOWS_TOKENS if case not in with_trait(SHARES)]
#: Methods in which a rounded score moves few tokens.
STEADY = [case for case in CASES if case not in with_trait(CHAINED)]


NOT_FINITE = (float("nan"), float("inf"))

#: Cases that choose by the tokens themselves and not by signals alone: each must refuse the token.
READS_TOKENS = {
    case_id(case)
    for case in CASES
    if case[0]
    in (
        "divprune",
        "cdpruner",
        "rtprune",
        "dycoke",
        "vispruner",
        "scope",
        "holov",
        "vscan",
        "fastvid",
        "evs",
        "vidcom2",
        "holitom",
        "prunevid",
        "scissor",
        "framefusion",
        "sttm",
        "pact",
        "idpruner",
        "aim",
        "btp",
        "vlmpruner",
        "visiontrim",
    )
    or (case[0] == "uvprune" and "attention" not in case[1].get("criterion", ""))
    or (case[0] == "d2pruner" and "selection" not in case[1])
}


@pytest.fixture
def method(case: Case) -> TokenReducer:
    return build(case)


def test_every_registered_reducer_is_under_test():
    assert {name for name, _ in CASES} | {"none"} == set(names_of(TokenReducer))


@pytest.mark.sampled
@every_method
def test_keeps_exactly_what_was_asked_in_order(method: TokenReducer):
    view = make_view(method)
    for keep in sorted({reachable(method, keep) for keep in (1, 2, 3, 7, 12, 24, 41, 47, 48)}):
        plan = method.plan(view, keep)
        plan.check(view.tokens.shape[1], keep)
        assert plan.kept.dtype == torch.long
        assert outcome(view, plan).shape == (3, keep, view.tokens.shape[2])


@pytest.mark.sampled
@every_method
def test_keeping_all_changes_nothing(method: TokenReducer):
    view = make_view(method)
    plan = method.plan(view, 48)
    assert torch.equal(plan.kept, torch.arange(48).expand(3, 48))
    assert torch.equal(outcome(view, plan), view.tokens)


@pytest.mark.parametrize("name", ["vidcom2", "holitom", "prunevid", "scissor", "sttm"])
def test_two_videos_share_the_budget_and_are_chosen_apart(name: str):
    method = build((name, {}))
    both = rows_of_view(make_view(method), [2])  # 24 tokens in frames of 3, and 24 in frames of 6
    apart = []
    for half in (slice(0, 24), slice(24, 48)):
        signals = {key: value[:, half] for key, value in both.signals.items()}
        apart.append(
            replace(both, tokens=both.tokens[:, half], grid=both.grid[:, half], signals=signals)
        )
    first, second = (outcome(view, method.plan(view, 10)) for view in apart)
    together = outcome(both, method.plan(both, 20))
    assert torch.allclose(together, torch.cat([first, second], dim=1), atol=1e-6)


@pytest.mark.sampled
@every_method
def test_a_batch_equals_its_rows_alone(method: TokenReducer):
    for keep in (reachable(method, 5), reachable(method, 24)):
        view = make_view(method)
        together = method.plan(view, keep)
        merged = outcome(view, together)
        for row in range(3):
            part = rows_of_view(view, [row])
            alone = method.plan(part, keep)
            assert torch.equal(alone.kept[0], together.kept[row])
            assert torch.allclose(outcome(part, alone)[0], merged[row], atol=1e-6)


@pytest.mark.sampled
@every_method
def test_the_same_view_gives_the_same_plan_and_stays_as_it_was(method: TokenReducer):
    first = make_view(method)
    before = first.tokens.clone(), {key: value.clone() for key, value in first.signals.items()}
    assert torch.equal(method.plan(first, 13).kept, method.plan(make_view(method), 13).kept)
    assert torch.equal(first.tokens, before[0])
    assert all(torch.equal(first.signals[key], value) for key, value in before[1].items())


@pytest.mark.sampled
@every_method
def test_half_precision_inputs_are_decided_in_fp32(method: TokenReducer):
    view = make_view(method)
    for dtype in (torch.float16, torch.bfloat16):
        halves = {key: value.to(dtype) for key, value in view.signals.items()}
        half = replaced(view, view.tokens.to(dtype), **halves)
        floats = {key: value.float() for key, value in halves.items()}
        wide = replaced(view, half.tokens.float(), **floats)
        plan = method.plan(half, 17)
        assert torch.equal(plan.kept, method.plan(wide, 17).kept)
        assert outcome(half, plan).dtype == dtype


@pytest.mark.sampled
@every_method
def test_identical_tokens_with_equal_scores_are_no_obstacle(method: TokenReducer, case: Case):
    keep = reachable(method, 10)
    for view in views_of_sites(method):
        flat = {
            key: torch.full_like(value, 0.25) if value.is_floating_point() else value
            for key, value in view.signals.items()
        }
        plan = method.plan(replaced(view, torch.ones_like(view.tokens), **flat), keep)
        plan.check(48, keep)
        if case in FROM_THE_FRONT:  # the rule for ties is the lower index first
            assert torch.equal(plan.kept, torch.arange(10).expand(3, 10))


def used(method: TokenReducer, view: View) -> None:
    """Measure by what a view shows, where it is shown to be measured, and choose by it."""
    if "text_information" in view.signals:
        method.measured(rows_of_view(view, [1]))
    method.plan(view, 12)


@every_method
def test_a_value_that_is_not_finite_is_an_error(method: TokenReducer):
    for view in views_of_sites(method):
        for (key, value), poison in product(view.signals.items(), NOT_FINITE):
            # Places are no floats, and an infinite prior means a score of 0.
            if not value.is_floating_point() or (key, poison) == ("prior", float("inf")):
                continue
            bad = value.clone()
            bad[1, 5 % value.shape[1]] = poison
            poisoned = replaced(view, **{key: bad})
            with pytest.raises(MethodError, match="NaN or infinite"):
                used(method, poisoned)


@every_method
def test_a_prompt_without_words_behind_the_image_is_refused(method: TokenReducer):
    for view in views_of_sites(method):
        if "text_positions" in view.signals:
            before = torch.arange(WORDS).expand(3, -1)
            with pytest.raises(MethodError, match="words after the image"):
                method.plan(replaced(view, text_positions=before), 12)


@every_method
def test_schedules_fall_from_site_to_site_and_grow_with_the_share(method: TokenReducer):
    n_sites = len(method.all_sites(BLOCKS, DEPTH))
    schedules = [method.fractions(step / 50, n_sites) for step in range(1, 51)]
    assert schedules[-1] == (1,) * n_sites
    for schedule in schedules:
        assert list(schedule) == sorted(schedule, reverse=True)
    for lower, higher in pairwise(schedules):
        assert all(a <= b + 1e-12 for a, b in zip(lower, higher, strict=True))


@pytest.mark.sampled
@every_method
def test_a_token_that_is_not_finite_is_an_error_or_not_read(method: TokenReducer, case: Case):
    view = make_view(method)
    keep = reachable(method, 17)
    clean = method.plan(view, keep).kept
    for poison in NOT_FINITE:
        bad = view.tokens.clone()
        bad[1, 5, 0] = poison
        try:
            kept = method.plan(replaced(view, bad), keep).kept
        except MethodError:
            kept = None
        if kept is None or case_id(case) in READS_TOKENS:
            with pytest.raises(MethodError, match="NaN or infinite"):
                method.plan(replaced(view, bad), keep)
        else:
            assert torch.equal(kept, clean)


@pytest.mark.sampled
@pytest.mark.parametrize("case", STEADY, ids=case_id)
def test_half_precision_changes_one_choice_in_ten_at_most(method: TokenReducer):
    view = make_view(method)
    keep = reachable(method, 17)
    exact = method.plan(view, keep).kept
    for dtype in (torch.float16, torch.bfloat16):
        halves = {
            key: value.to(dtype) if value.is_floating_point() else value
            for key, value in view.signals.items()
        }
        rounded = method.plan(replaced(view, view.tokens.to(dtype), **halves), keep).kept
        same = (rounded.unsqueeze(2) == exact.unsqueeze(1)).any(dim=2).float().mean(dim=1)
        assert same.min() >= 0.9


@pytest.mark.parametrize("case", FOLLOWS_TOKENS, ids=case_id)
def test_the_choice_follows_the_tokens(method: TokenReducer):
    view = make_view(method, (((0, 0, 6, 8),), ((0, 0, 6, 8),)))
    order = torch.randperm(48, generator=torch.Generator().manual_seed(1))
    kept = method.plan(view, 11).kept
    moved = method.plan(permuted(view, order), 11).kept
    assert torch.equal(order[moved].sort(dim=1).values, kept)


@every_method
def test_no_token_at_all_and_more_than_there_are_is_refused(method: TokenReducer):
    view = make_view(method)
    for keep in (0, 49):
        with pytest.raises(PlanError, match=f"asked to keep {keep} of 48 tokens; valid: 1 to"):
            method.answer(view, keep)


def test_a_grid_that_does_not_match_the_tokens_is_refused():
    view = make_view(build(("divprune", {})))
    for grid in (view.grid[:, :-1], view.grid[:1], view.grid[..., :3]):
        with pytest.raises(MethodError, match=r"grid \(.*\) does not match tokens \(3, 48, 16\)"):
            replace(view, grid=grid)


@every_method
def test_sites_lie_inside_the_model_and_signals_are_known(method: TokenReducer):
    from espalier.harness.engine.signals.table import SIGNALS

    for site in method.sites(DEPTH):
        assert site.where in ("vision", "prefix", "layer")
        assert 0 <= site.layer < DEPTH
        assert {need.signal for need in method.needs(site)} <= set(SIGNALS)


@every_method
def test_positions_are_renumbered_before_the_decoder_and_as_released(
    method: TokenReducer, case: Case
):
    inside = any(site.where == "layer" for site in method.sites(DEPTH))
    habit = "original" if inside else "renumbered"
    positions = method.positions(DEPTH)
    if type(method).positions is TokenReducer.positions or case[0] in RELEASED:
        assert positions == RELEASED.get(case[0], habit)
    else:
        assert positions in get_args(Positions)
