"""`scope=item`: each picture of a prompt keeps what it keeps when it is alone."""

from __future__ import annotations

import pytest
import torch

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.prefill import joined
from espalier.harness.engine.session import Session
from espalier.harness.specs.catalogue import build_method
from espalier.methods.base import Plan
from espalier.methods.plans import Assignment, Mixture
from tests.tiny import chat, picture

BUDGET = Budget("kept", 0.7)


def run(adapter, name, *media, **options):
    with Session(adapter, build_method(name, {}), BUDGET, **options) as session:
        batch = session.generate(
            adapter.encode([chat("w1 w2", *media)]), ["a"], max_new_tokens=2, do_sample=False
        )
    return batch.records[0]


@pytest.mark.parametrize("name", ["random", "divprune", "visionzip", "cdpruner"])
def test_a_picture_keeps_what_it_keeps_alone(double, name):
    pictures = [picture(seed) for seed in range(3)]
    alone = [run(double, name, one_picture) for one_picture in pictures]
    together = run(double, name, *pictures, scope="item")
    starts = [sum(record.visual for record in alone[:n]) for n in range(3)]
    expected = torch.cat([r.origin + start for r, start in zip(alone, starts, strict=True)])
    assert together.origin.tolist() == expected.tolist()
    assert together.items == tuple(record.visual for record in alone)
    assert together.requested == together.kept == (sum(record.kept[0] for record in alone),)
    BUDGET.verify(build_method(name, {}), double.facts, together)
    if name != "random":
        mixed = run(double, name, *pictures)
        assert mixed.origin.tolist() != expected.tolist()
        assert mixed.items is None


def test_merges_of_items_are_joined():
    tokens = torch.randn(1, 7, 3)
    kept = [torch.tensor([[0, 2]]), torch.tensor([[1]]), torch.tensor([[0]])]
    assignment = Assignment(torch.tensor([[0, 1, 1]]), torch.tensor([[1.0, 0.5, 0.5]]))
    mixture = Mixture(torch.tensor([[[0.25, 0.75]]]))
    items = (3, 2, 2)
    for merges in ((assignment, mixture, None), (assignment, None, None), (None, None, None)):
        plan = joined([Plan(k, merge) for k, merge in zip(kept, merges, strict=True)], items)
        assert plan.kept.tolist() == [[0, 2, 4, 5]]
        values = [
            part[:, k[0]] if merge is None else merge.apply(part, k.shape[1])
            for part, k, merge in zip(tokens.split(items, 1), kept, merges, strict=True)
        ]
        assert (plan.merge is None) == (merges == (None, None, None))
        if plan.merge is not None:
            torch.testing.assert_close(plan.merge.apply(tokens, 4), torch.cat(values, 1))
