"""A method on tiny models of several families: the checks that every one must pass."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget, BudgetError
from espalier.harness.models.adapter import Adapter
from espalier.methods.base import TokenReducer
from tests.methods.runs import kept_by

#: Raster and class token, crops and newlines, merged patches and windows, shrunk planes, video, pixel shuffle.
NAMES = ("llava", "llava_next", "qwen2_5_vl", "onevision_image", "onevision_video", "internvl")

#: What a refusal says that a method can reach.
RANGE = re.compile(r"reaches (\S+) <= ratio < (\S+) ")
COUNTS = re.compile(r"reaches (\d+) <= keep <= (\d+) ")

Chats = Sequence[list[dict]]


def check_cell(
    adapter: Adapter,
    method: TokenReducer,
    chats: Chats,
    plain: Tensor,
    rows: Sequence[int],
    **changes: Any,
) -> None:
    """Ratio 0 changes nothing, dropping equals emulation, `rows` equal themselves alone, and something happens at all.

    Args:
        adapter: a tiny model, whose logits without reduction are `plain`.
    """
    samples = [f"s{row}" for row in range(len(chats))]
    untouched = kept_by(adapter, method, chats, 0.0, samples, **changes).logits
    # What acts while tokens are generated acts at every ratio: then the prefill alone is untouched.
    steps = plain.shape[1] if method.decode_site(adapter.facts.text.layers) is None else 1
    assert torch.equal(untouched[:, :steps], plain[:, :steps])
    fast = kept_by(adapter, method, chats, 0.6, samples, **changes)
    slow = kept_by(adapter, method, chats, 0.6, samples, backend="emulate", **changes)
    assert torch.equal(fast.ids, slow.ids)
    assert (fast.logits - slow.logits).abs().max() < 1e-9 * slow.logits.abs().max()
    assert (fast.logits[:, 0] - plain[:, 0]).abs().max() > 1e-2
    for row in rows:
        alone = kept_by(adapter, method, [chats[row]], 0.6, samples[row : row + 1], **changes)
        assert alone.records[0].kept == fast.records[row].kept == fast.records[row].requested
        assert torch.equal(alone.records[0].origin, fast.records[row].origin)
        assert (alone.logits[0] - fast.logits[row]).abs().max() < 1e-3


def check_budget(
    adapter: Adapter, method: TokenReducer, chats: Chats, budget: Budget, **changes: Any
) -> float:
    """Every sample meets a rule within rounding; a ratio out of reach is refused, and one of the range named runs.

    Returns:
        The ratio that ran.
    """
    facts = adapter.facts
    try:
        budget.check(method, facts)
    except BudgetError as error:
        low, high = reached_by(error)
        budget = Budget(budget.rule, refused_outside(low, high, budget.ratio))
    done = kept_by(adapter, method, chats, budget.ratio, rule=budget.rule, **changes)
    for record in done.records:
        reached = budget.verify(method, facts, record)
        target = (1 - budget.ratio) * record.visual
        assert record.kept == record.requested
        assert abs(getattr(reached, budget.rule) - target) <= 1 + 1e-9
        # The two rules that are sums, counted here once more.
        if budget.rule == "kept":
            assert abs(record.entering[-1] - target) <= 0.5 + 1e-9
        if budget.rule == "average":
            assert abs(sum(record.entering) / len(record.entering) - target) <= 1 + 1e-9
    return budget.ratio


def check_count(
    adapter: Adapter, method: TokenReducer, chats: Chats, count: int, **changes: Any
) -> None:
    """Every sample keeps the count after the last site, or all of its tokens; one out of reach is refused."""
    try:
        done = kept_by(adapter, method, chats, 0.0, count=count, **changes)
    except BudgetError as error:
        ((low, high),) = COUNTS.findall(str(error))
        assert not int(low) <= count <= int(high)
        return
    for record in done.records:
        assert record.kept == record.requested
        assert record.kept[-1] == record.entering[-1] == min(count, record.visual)
        assert len(record.origin) == min(count, record.visual)


def reached_by(error: BudgetError) -> tuple[float, float]:
    """Return the range of ratios that a refusal names."""
    (bounds,) = RANGE.findall(str(error))
    return float(bounds[0]), float(bounds[1])


def refused_outside(low: float, high: float, ratio: float) -> float:
    """Hold that a refused ratio lies outside the range; return one inside."""
    assert low < high
    assert not low <= ratio < high
    return (low + high) / 2
