"""Top-p: counts by hand and by a slow version, the budget as a ceiling, and rows of a batch that keep other counts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from espalier.harness.cost.budget import Budget, BudgetMismatch
from espalier.harness.kinds.lookup import kind_of
from espalier.methods.base import Plan, PlanError, View
from espalier.methods.fastv import FastV
from espalier.methods.top_p import TopP
from run import main
from tests.families import FAMILIES
from tests.family_runs import adapter_of
from tests.methods.cases import make_view, replaced
from tests.methods.runs import check_adaptive
from tests.runs.helpers import fake_record
from tests.runs.test_keys import spec_of

TOP_P = TopP()


def slow_choice(scores: list[float], p: float, keep: int) -> list[int]:
    """The indices, one token after another until the share is held."""
    if keep == len(scores):
        return list(range(keep))
    left, kept = sorted(range(len(scores)), key=lambda index: (-scores[index], index)), []
    while not kept or (sum(scores[i] for i in kept) < p * sum(scores) and len(kept) < keep):
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


@pytest.mark.parametrize("p", [0.01, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("keep", [1, 7, 30, 48])
def test_the_choice_equals_the_slow_one(p: float, keep: int) -> None:
    for seed in range(8):
        scores = torch.rand(48, generator=torch.Generator().manual_seed(seed)) ** (1 + 3 * seed)
        expected = slow_choice(scores.double().tolist(), p, keep)
        if p == 1:
            expected = FastV().answer(attended(scores.tolist()), keep).kept[0].tolist()
        assert choose(scores.tolist(), keep, p) == expected


@pytest.mark.parametrize(("p", "ratio"), [(0.3, 0.5), (0.9, 0.8)])
def test_rows_of_a_batch_keep_what_they_keep_alone(p: float, ratio: float) -> None:
    def count(view: View, allowed: int) -> int:
        return len(slow_choice(view.signals["last_attention"][0].double().tolist(), p, allowed))

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


def test_a_result_has_the_share_that_was_achieved(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    run = ("method=top_p", "ratio=0.5", "benchmark=seedling_vqa", "limit=8", f"store={tmp_path}")
    assert main([*run, "model.device=cpu", "engine.paired=0", "method.params.p=0.5"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["extra"]["adaptive"] is True
    assert 1 <= row["tokens"]["kept_final"] < row["tokens"]["requested_keep"] == 72
    assert row["extra"]["achieved"]["kept"] == row["tokens"]["kept_final"]
