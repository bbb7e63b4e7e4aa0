"""PyramidDrop: where its stages end, what they keep, and what they look at."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from harness.budget import Budget
from harness.config.compose import read_command
from harness.config.spec import RunSpec
from harness.measure.schedule import achieved
from methods.base import MethodError, Site
from methods.pyramiddrop import PyramidDrop
from tests.families import FAMILIES
from tests.method_cases import make_view, replaced
from tests.method_runs import adapter_of, kept_by, recall
from tests.tiny import DEPTH


def facts_of(name: str):
    command = read_command([f"model={name}"])
    assert command is not None
    return RunSpec.from_config(command.cells[0]).model.facts


def layers_of(method: PyramidDrop, depth: int) -> list[int]:
    return [site.layer for site in method.sites(depth)]


@pytest.mark.parametrize(
    ("depth", "layers"), [(32, [8, 16, 24]), (28, [7, 14, 21]), (6, [1, 3, 4]), (4, [1, 2, 3])]
)
def test_stages_are_equally_long(depth: int, layers: list[int]):
    assert layers_of(PyramidDrop(), depth) == layers


def test_stages_may_be_set():
    assert layers_of(PyramidDrop(S=2), 32) == [16]
    assert layers_of(PyramidDrop(layers=(2, 4, 6)), 32) == [2, 4, 6]


def test_the_published_schedule():
    """576, 288, 144 and 72 tokens over eight layers each: 270 on average."""
    facts = facts_of("llava15_7b")
    kept = Budget("kept", 0.875).keep(PyramidDrop(), facts, 576, 32)
    assert kept == (288, 144, 72)
    assert achieved(PyramidDrop(), facts, 576, 32, kept).average == 270


@pytest.mark.parametrize(
    ("tokens", "first", "share"), [(192, 4, 0.547), (128, 2, 0.515), (64, 2, 0.307)]
)
def test_averages_below_a_quarter_need_earlier_layers(tokens: int, first: int, share: float):
    facts, budget = facts_of("llava15_7b"), Budget("average", 1 - tokens / 576)
    method = PyramidDrop(layers=(first, 2 * first, 3 * first))
    kept = budget.keep(method, facts, 576, 32)
    assert achieved(method, facts, 576, 32, kept).average == pytest.approx(tokens, abs=1)
    assert kept[0] / 576 == pytest.approx(share, abs=2e-3)
    assert kept[1] / 576 == pytest.approx(share**2, abs=2e-3)
    if tokens < 144:  # what layers 0 to 7 alone amount to
        with pytest.raises(Exception, match="cannot be met"):
            budget.keep(PyramidDrop(), facts, 576, 32)


def test_schedules_fall_from_stage_to_stage_and_grow_with_the_share():
    shares = [0.001, 0.125, 0.3, 0.9, 1.0]
    schedules = [PyramidDrop().fractions(share, 3) for share in shares]
    assert schedules[1] == pytest.approx((0.5, 0.25, 0.125))
    assert schedules[-1] == (1, 1, 1)
    for schedule in schedules:
        assert list(schedule) == sorted(schedule, reverse=True)
    for lower, higher in pairwise(schedules):
        assert all(a < b for a, b in zip(lower, higher, strict=True))


def test_keeps_the_highest_and_finds_what_was_planted():
    view = make_view(PyramidDrop(), [((0, 0, 12, 12),)] * 16)
    wanted = view.signals["last_attention"].topk(20, dim=1).indices.sort(dim=1).values
    assert torch.equal(PyramidDrop().plan(view, 20).kept, wanted)
    found, floor, canary = recall(
        PyramidDrop(), 144, lambda scores: replaced(view, last_attention=scores)
    )
    assert found == 1
    assert canary < floor


def test_what_is_out_of_range_names_the_key():
    with pytest.raises(MethodError, match=r"method\.params\.S=1 "):
        PyramidDrop(S=1)
    with pytest.raises(MethodError, match=r"method\.params\.S=9 .*2 to 6 \(the model has 6 "):
        PyramidDrop(S=9).sites(6)
    with pytest.raises(MethodError, match=r"method\.params\.layers=6 .*1 to 5"):
        PyramidDrop(layers=(2, 6)).sites(6)
    for layers in ((4, 2), (2, 2), (0, 3)):
        with pytest.raises(MethodError, match=r"method\.params\.layers=\[.*ascending"):
            PyramidDrop(layers=layers)


@pytest.mark.parametrize(
    "name", ["llava", "llava_next", "onevision_image", "onevision_video", "qwen2_5_vl", "internvl"]
)
def test_on_models(name: str):
    """Each stage keeps the highest of what is left, by the layer that ends it, whatever row it stands in."""
    adapter, chats, seen = adapter_of(name), FAMILIES[name].chats, []

    class Watched(PyramidDrop):
        def plan(self, view, keep):
            plan = super().plan(view, keep)
            seen.append((view, keep, plan))
            return plan

    method = PyramidDrop()
    sites = method.sites(DEPTH)
    assert sites == (Site("layer", 1), Site("layer", 2), Site("layer", 3))
    untouched = kept_by(adapter, replace(method), chats, 0.0)
    assert all(record.kept == (record.visual,) * 3 for record in untouched.records)
    batch = kept_by(adapter, method, chats, 0.875, "abc")
    slow = kept_by(adapter, method, chats, 0.875, "abc", backend="emulate")
    for row, one in enumerate(chats):
        seen.clear()
        alone = kept_by(adapter, Watched(), [one], 0.875, "abc"[row])
        record = alone.records[0]
        assert record.kept == batch.records[row].kept == tuple(keep for _, keep, _ in seen)
        assert torch.equal(batch.records[row].origin, record.origin)
        assert torch.equal(slow.records[row].origin, record.origin)
        left = list(range(record.visual))
        for view, keep, _ in seen:
            scores = view.signals["last_attention"][0]
            order = sorted(range(len(left)), key=lambda i: (-float(scores[i]), i))
            left = sorted(left[i] for i in order[:keep])
        assert record.origin.tolist() == left
        halves = [round(record.visual * share) for share in (0.5, 0.25, 0.125)]
        assert all(abs(a - b) <= 1 for a, b in zip(record.kept, halves, strict=True))
