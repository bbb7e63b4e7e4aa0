"""FitPrune: its score, its family of schedules, its scheme in a run, budgets, and itself on models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from espalier.harness.cost.budget import Budget, BudgetError, equivalent_tokens
from espalier.harness.engine import artifacts
from espalier.harness.engine.artifacts import save_scheme, scheme_artifact, with_scheme
from espalier.harness.errors import UserError
from espalier.harness.runs.admission import Job, admit
from espalier.harness.specs.catalogue import build_method
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import MethodError, View
from espalier.methods.fastv import FastV
from espalier.methods.fitprune import FitPrune
from tests import commands
from tests.families import FAMILIES
from tests.family_runs import adapter_of
from tests.methods.cases import SQUARE, make_view, replaced
from tests.methods.runs import check_stages
from tests.methods.twins import best, check_method, seeded

#: Four sites, as the tiny models have.
SCHEME = ((0.9, 0.8, 0.8, 0.7), (0.6, 0.5, 0.3, 0.2), (0.3, 0.1, 0.1, 0.05))
METHOD = FitPrune(SCHEME)


def run_of(*overrides: str) -> Job:
    return admit(commands.spec_of("method=fitprune", *overrides), Digests())


# ---------------------------------------------------------------- what is kept


def slow_products(view: View, row: int = 0) -> list[float]:
    words, image = (view.signals[key][row] for key in ("text_received_max", "visual_received_max"))
    return (words * image).tolist()


test_fitprune = check_method(
    "fitprune",
    lambda _method, view, row, keep: best(slow_products(view, row), keep),
    views=seeded(SQUARE * 3),
    keeps=(1, 2, 17, 143, 144),
)


def test_a_worked_example():
    """Token 0 is loved by words alone, token 3 by the image alone; the middle ones are liked by both."""
    view = make_view(FitPrune(), [((0, 0, 1, 4),)])
    view = replaced(
        view,
        text_received_max=torch.tensor([[0.9, 0.5, 0.4, 0.1]]),
        visual_received_max=torch.tensor([[0.1, 0.4, 0.5, 0.9]]),
    )
    assert FitPrune().plan(view, 2).kept.tolist() == [[1, 2]]
    assert FitPrune().plan(view, 3).kept.tolist() == [[0, 1, 2]]


# ---------------------------------------------------------------- schedules


def test_rows_stand_at_evenly_spaced_alphas_and_shares_between_them_are_linear():
    for alpha, row in zip((0.0, 0.25, 0.5, 0.75), ((1.0,) * 4, *SCHEME), strict=True):
        assert METHOD.fractions(1 - alpha, 4) == pytest.approx(row)
    assert METHOD.fractions(0.375, 4) == pytest.approx((0.45, 0.3, 0.2, 0.125))
    assert METHOD.fractions(0.125, 4) == pytest.approx((0.15, 0.05, 0.05, 0.025))
    assert max(METHOD.fractions(1e-9, 4)) < 1e-8


@pytest.mark.parametrize("rule", ["kept", "average", "flops"])
def test_every_budget_is_met_to_less_than_a_token(rule: str):
    facts = commands.spec_of("model=llava15_7b").model.facts
    rows = tuple(
        tuple((1 - alpha) ** (2 + 6 * site / 31) for site in range(31))
        for alpha in (0.25, 0.5, 0.75)
    )
    method = FitPrune(rows)
    before: tuple[int, ...] = (576,) * 31
    for ratio in (0.1, 1 / 3, 2 / 3, 7 / 9, 8 / 9, 0.95):
        kept = Budget(rule, ratio).keep(method, facts, 576, 40)
        assert list(kept) == sorted(kept, reverse=True)
        assert all(a <= b for a, b in zip(kept, before, strict=True))
        reached = getattr(equivalent_tokens(method, facts, 576, 40, kept), rule)
        assert abs(reached - (1 - ratio) * 576) < 1
        before = kept
    if rule == "average":  # layer 0 sees every token
        with pytest.raises(BudgetError, match=r"reaches 0 <= ratio < 0\.96"):
            Budget(rule, 0.97).keep(method, facts, 576, 40)


@pytest.mark.parametrize(
    ("scheme", "row"),
    [
        (((),), 0),
        (((0.5, 0.6),), 0),
        (((1.1, 0.6),), 0),
        (((0.5, -0.1),), 0),
        (((0.5, float("nan")),), 0),
        (((0.5, 0.4), (0.5, 0.45)), 1),
        (((0.5, 0.4), (0.3,)), 1),
    ],
)
def test_a_scheme_that_rises_or_has_holes_names_the_row(scheme: tuple, row: int):
    with pytest.raises(MethodError, match=rf"method\.params\.scheme\[{row}\]=.*never rise"):
        FitPrune(scheme)


def test_a_scheme_must_fit_the_model():
    with pytest.raises(MethodError, match=r"method\.params\.scheme\[0\]=.*valid: 5 shares \(.*6 "):
        METHOD.sites(6)
    with pytest.raises(MethodError, match=r"method\.params\.scheme=\(\).*espalier calibrate"):
        FitPrune().fractions(0.5, 4)
    assert build_method("fitprune", {"scheme": [[0.5, 0.25]]}) == FitPrune(((0.5, 0.25),))
    with pytest.raises(UserError, match=r"method\.params\.scheme\[0\]\[1\]='x' must be a number"):
        build_method("fitprune", {"scheme": [[0.5, "x"]]})


# ---------------------------------------------------------------- the scheme in a run


def test_a_run_finds_the_shipped_scheme_and_carries_it_in_its_key():
    job = run_of("ratio=0.6")
    assert {len(row) for row in job.method.scheme} == {5}
    assert job.parts["settings"]["method"]["params"]["scheme"] == list(map(list, job.method.scheme))
    row = "method.params.scheme=[[0.9,0.8,0.7,0.6,0.5]]"
    changed = run_of("ratio=0.6", row)
    assert changed.method == FitPrune(((0.9, 0.8, 0.7, 0.6, 0.5),))
    assert changed.key != job.key


def test_every_shipped_model_has_a_scheme_of_its_own():
    schemes = [
        with_scheme(commands.spec_of(f"model={name}").model, FitPrune(), "fitprune")
        for name in ("seedling", "seedling_full", "seedling_draft")
    ]
    assert len(set(schemes)) == 3


def test_a_scheme_comes_back_as_it_was_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(artifacts, "DEFAULT_STORE", tmp_path)
    model = commands.spec_of().model
    command = r"python -m espalier calibrate method=fitprune model=seedling"
    with pytest.raises(UserError, match=rf"'seedling' has no fitted scheme; run: {command}$"):
        with_scheme(model, FitPrune(), "fitprune")
    scheme = ((0.9, 0.8, 0.7, 0.6, 0.123457), (0.5, 0.4, 0.3, 0.2, 0.1))
    path = save_scheme(model, scheme, {"images": 2, "prompt": "w"})
    assert path == scheme_artifact(model).path
    assert with_scheme(model, FitPrune(), "fitprune") == FitPrune(scheme)
    described = json.loads(path.with_suffix(".json").read_text())
    assert (described["model"], described["alphas"], described["dtype"]) == (
        "seedling",
        2,
        "float32",
    )
    kept = FitPrune(((0.4,) * 5,))
    assert with_scheme(model, kept, "fitprune") is kept
    other = FastV()
    assert with_scheme(model, other, "fastv") is other
    path.with_suffix(".json").write_text("{}")
    with pytest.raises(UserError, match=r"fitted scheme seedling_fitprune\.safetensors has no"):
        with_scheme(model, FitPrune(), "fitprune")


@pytest.mark.parametrize("scheme", [((0.5, 0.4),), ((0.5, 0.6, 0.4, 0.3, 0.2),)])
def test_a_stored_scheme_that_is_none_is_one_line(
    scheme: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(artifacts, "DEFAULT_STORE", tmp_path)
    model = commands.spec_of().model
    save_scheme(model, scheme, {})
    with pytest.raises(UserError, match="holds no scheme for this model; run: python"):
        with_scheme(model, FitPrune(), "fitprune")


def test_another_model_asks_for_images_of_its_own():
    model = replace(commands.spec_of("model=llava15_7b").model, name="nowhere")
    with pytest.raises(UserError, match=r"model=nowhere images_dir=<folder of images>$"):
        with_scheme(model, FitPrune(), "fitprune")


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("name", ["llava", "onevision_video"])
def test_each_layer_keeps_the_best_of_what_its_own_attention_saw(name: str):
    record = check_stages(adapter_of(name), METHOD, FAMILIES[name].chats[0], 0.6, slow_products)
    assert len(set(record.kept)) > 1
