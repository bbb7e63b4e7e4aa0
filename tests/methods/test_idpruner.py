"""IDPruner against a slow version, by hand, on models, and against what its released code keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from espalier.methods.base import MethodError, Site, View
from espalier.methods.idpruner import IDPruner
from espalier.methods.select.cosines import memory_limit
from tests.methods.cases import make_view
from tests.methods.released import numbers, released_view, shares, vectors
from tests.methods.runs import check_on_engine

PREFIX = Site("prefix")


def slow_idpruner(method: IDPruner, view: View, row: int, keep: int) -> list[int]:
    weight, tokens = view.signals["cls_attention"][row].double(), view.tokens[row].double()
    low, high = float(weight.min()), float(weight.max())
    kept: list[int] = []

    def relevance(i: int) -> float:
        importance = (float(weight[i]) - low) / (high - low + 1e-6)
        if not kept:
            return importance
        like = max(float(torch.cosine_similarity(tokens[i], tokens[j], dim=0)) for j in kept)
        return method.mmr_lambda * importance - (1 - method.mmr_lambda) * like

    while len(kept) < keep:
        rest = [i for i in range(len(tokens)) if i not in kept]
        kept.append(max(rest, key=lambda i: (relevance(i), -i)))
    return sorted(kept)


@pytest.mark.parametrize("method", [IDPruner(), IDPruner(0.0), IDPruner(1.0)], ids=str)
def test_equals_the_slow_one(method: IDPruner):
    view = make_view(method)
    for keep in (1, 7, 24):
        kept = method.plan(view, keep).kept
        assert kept.tolist() == [slow_idpruner(method, view, row, keep) for row in range(3)]
        with memory_limit(0):
            assert torch.equal(method.plan(view, keep).kept, kept)


def test_three_tokens_by_hand():
    """The second is 0.9 as important as the first and its twin: 0.45 - 0.5 < 0.5 * 0.2 - 0."""
    tokens = torch.tensor([[[1.0, 0], [2, 0], [0, 1], [0, 2]]])
    view = released_view(PREFIX, tokens, 2, cls_attention=torch.tensor([[1.0, 0.9, 0.2, 0.0]]))
    assert IDPruner().plan(view, 2).kept.tolist() == [[0, 2]]
    assert IDPruner(0.6).plan(view, 2).kept.tolist() == [[0, 1]]
    assert IDPruner().plan(view, 3).kept.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("case", vectors("idpruner"), ids=lambda case: str(case["seed"]))
def test_keeps_what_the_released_code_keeps(case: dict[str, Any]):
    attention = shares(case["seed"] + 100, 1, case["tokens"])
    tokens = numbers(case["seed"], 1, case["tokens"], 8)
    view = released_view(PREFIX, tokens, case["tokens"], cls_attention=attention)
    plan = IDPruner(**case["params"]).plan(view, case["keep"])
    assert plan.kept[0].tolist() == case["kept"]


def test_values_out_of_range_name_the_key():
    with pytest.raises(MethodError, match=r"method\.params\.mmr_lambda=1\.5"):
        IDPruner(1.5)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_on_models(name: str):
    check_on_engine(name, IDPruner(), slow_idpruner)
