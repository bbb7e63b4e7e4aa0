"""Top-p: counts by hand and by a slow version, the budget as a ceiling, and rows of a batch that keep other counts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from espalier.harness.cost.budget import Budget, BudgetMismatch
from espalier.harness.kinds.lookup import kind_of
from espalier.methods.base import Plan, PlanError, View
from espalier.methods.top_p import TopP
from run import main
from tests.families import FAMILIES
from tests.family_runs import adapter_of
from tests.methods.cases import make_view, replaced
from tests.methods.runs import check_adaptive
from tests.methods.twins import check_method
from tests.runs.helpers import fake_record
from tests.runs.test_keys import spec_of

TOP_P = TopP()


def slow_top_p(method: TopP, view: View, row: int, keep: int) -> list[int]:
    """One token after another until the share is held, or as many as FastV."""
    scores = view.signals["last_attention"][row].double().tolist()
    if keep == len(scores):
        return list(range(keep))
    left, kept = sorted(range(len(scores)), key=lambda index: (-scores[index], index)), []
    held = method.p * sum(scores) if method.p < 1 else math.inf
    while not kept or (sum(scores[i] for i in kept) < held and len(kept) < keep):
        kept.append(left.pop(0))
    return sorted(kept)


def attended(scores: list[float]) -> View:
    view = make_view(TOP_P, [((0, 0, 1, len(scores)),)])
    return replaced(view, last_attention=torch.tensor([scores]))


def choose(scores: list[float], keep: int, p: float = 0.9) -> list[int]:
    return TopP(p=p).answer(attended(scores), keep).kept[0].tolist()


@pytest.mark.parametrize(
    ("scores", "keep", "kept"),
    [
        ([0.1, 0.5, 0.3, 0.1], 3, [1, 2]),  # 0.8 of 1
        ([0.1, 0.5, 0.3, 0.1], 1, [1]),
        ([0.1, 0.5, 0.3, 0.1], 4, [0, 1, 2, 3]),  # ratio 0
        ([0.0, 0.9, 0.0, 0.0], 3, [1]),
        ([0.0, 0.0, 0.0, 0.0], 3, [0]),
        ([0.25, 0.25, 0.25, 0.25], 3, [0, 1, 2]),  # ties go to the lower index
    ],
)
def test_a_worked_example(scores: list[float], keep: int, kept: list[int]) -> None:
    assert choose(scores, keep, p=0.75) == kept


def attended_by(_method: TopP, _keep: int, seed: int) -> View:
    noise = torch.rand(48, generator=torch.Generator().manual_seed(seed))
    return attended((noise ** (1 + 3 * seed)).tolist())


test_top_p = check_method(
    "top_p",
    slow_top_p,
    settings=[{"p": p} for p in (0.01, 0.5, 0.9, 1.0)],
    views=attended_by,
    varied=range(8),
    keeps=lambda _n_tokens: (1, 7, 30, 48),
)


@pytest.mark.parametrize(("p", "ratio"), [(0.3, 0.5), (0.9, 0.8)])
def test_rows_of_a_batch_keep_what_they_keep_alone(p: float, ratio: float) -> None:
    def count(view: View, allowed: int) -> int:
        return len(slow_top_p(TopP(p=p), view, 0, allowed))

    check_adaptive(adapter_of("llava"), TopP(p=p), FAMILIES["llava"].chats, ratio, count)


class Greedy(TopP):
    """Keeps everything, whatever the budget is."""

    def plan(self, view: View, keep: int) -> Plan:
        return Plan(torch.arange(view.tokens.shape[1]).expand(len(view.tokens), -1))


def test_more_than_the_budget_is_an_error_in_the_plan_and_in_the_account(tmp_path: Any) -> None:
    with pytest.raises(PlanError, match="Greedy kept 4 tokens; the budget allows 3"):
        Greedy().answer(attended([0.1, 0.5, 0.3, 0.1]), 3)
    spec = replace(spec_of(tmp_path), budget=Budget("kept", 0.5))
    kind = kind_of(TOP_P, spec)
    whole = fake_record(spec, TOP_P, "t/0")
    fewer = replace(
        whole,
        kept=(9,),
        entering=tuple(min(9 if at > 1 else 144, n) for at, n in enumerate(whole.entering)),
    )
    assert kind.account(spec, TOP_P, [whole, fewer]).tokens["kept_final"] == (72 + 9) / 2
    with pytest.raises(BudgetMismatch, match="kept 73 tokens, at most 72 are allowed"):
        kind.account(spec, TOP_P, [replace(whole, kept=(73,))])


@pytest.mark.slow
def test_a_result_has_the_share_that_was_achieved(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    run = ("method=top_p", "ratio=0.5", "benchmark=seedling_vqa", "limit=8", f"store={tmp_path}")
    assert (
        main([*run, "json=true", "model.device=cpu", "engine.paired=0", "method.params.p=0.5"]) == 0
    )
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["extra"]["adaptive"] is True
    assert 1 <= row["tokens"]["kept_final"] < row["tokens"]["requested_keep"] == 72
    assert row["extra"]["achieved"]["kept"] == row["tokens"]["kept_final"]
