"""`engine.scope=item`: a method chooses in each picture and video of a prompt by itself, as a serving engine does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from espalier.methods.base import Plan, View
from espalier.methods.plans import Assignment, Mixture

#: Returns the signals of a view's tokens, by their (1, n) places in the view of the whole prompt.
SignalsOf = Callable[[Tensor], dict[str, Tensor]]


def item_counts(picture: Tensor, count: int) -> tuple[int, ...]:
    """Return the visual tokens of each item of one row; `picture` (N,) numbers them from 0, `count` are real."""
    return tuple(torch.bincount(picture[:count]).tolist())


def plan_by_item(
    answer: Callable[[View, int], Plan],
    view: View,
    items: Sequence[int],
    keep: Sequence[int],
    signals_of: SignalsOf,
    generator_of: Callable[[], torch.Generator],
) -> Plan:
    """Return the plan of one prompt, from a plan for each item.

    Args:
        answer: of the method: a view and a count.
        view: of the whole prompt.
        items: tokens of each item, which follow each other.
        keep: tokens of each that stay.
        signals_of: of the tokens of an item.
        generator_of: a new source of chance for each item, always in the same state.
    """
    plans, start = [], 0
    for count, kept in zip(items, keep, strict=True):
        places = slice(start, start + count)
        grid = view.grid[:, places].clone()
        grid[..., 0] -= grid[..., 0].min()
        index = torch.arange(start, start + count, device=grid.device).unsqueeze(0)
        part = replace(
            view,
            tokens=view.tokens[:, places],
            grid=grid,
            signals=signals_of(index),
            generators=[generator_of()],
        )
        plans.append(answer(part, kept))
        start += count
    return joined(plans, items)


def joined(plans: Sequence[Plan], items: Sequence[int]) -> Plan:
    """Return one plan of consecutive items' plans.

    Args:
        plans: of each item.
        items: tokens of each item.
    """
    starts = [sum(items[:number]) for number in range(len(items))]
    kept = torch.cat([plan.kept + start for plan, start in zip(plans, starts, strict=True)], 1)
    spares = [plan.spare for plan in plans if plan.spare is not None]
    scores = [plan.scores for plan in plans if plan.scores is not None]
    return Plan(
        kept=kept,
        merge=_merged(plans, items),
        spare=torch.stack(spares).clamp(min=0).sum(0) if spares else None,
        scores=torch.cat(scores, 1) if len(scores) == len(plans) else None,
    )


def _merged(plans: Sequence[Plan], items: Sequence[int]) -> Assignment | Mixture | None:
    merges = [plan.merge for plan in plans]
    if all(merge is None for merge in merges):
        return None
    widths = [plan.kept.shape[1] for plan in plans]
    rows = plans[0].kept
    if any(isinstance(merge, Mixture) for merge in merges):
        parts = [_matrix(plan, count) for plan, count in zip(plans, items, strict=True)]
        return Mixture(torch.block_diag(*parts).unsqueeze(0))
    slots, weights = [], []
    for number, (plan, count) in enumerate(zip(plans, items, strict=True)):
        slot = rows.new_full((1, count), -1)
        weight = torch.ones_like(slot, dtype=torch.float32)
        if isinstance(plan.merge, Assignment):
            slot, weight = plan.merge.slot, plan.merge.weight
        else:
            slot[0, plan.kept[0]] = torch.arange(widths[number], device=slot.device)
        slots.append(torch.where(slot < 0, slot, slot + sum(widths[:number])))
        weights.append(weight)
    return Assignment(torch.cat(slots, 1), torch.cat(weights, 1))


def _matrix(plan: Plan, count: int) -> Tensor:
    """Return (K, N): the values of kept tokens as sums of an item's tokens."""
    if isinstance(plan.merge, Mixture):
        return plan.merge.matrix[0]
    unit = torch.eye(count, device=plan.kept.device)
    if plan.merge is None:
        return unit[plan.kept[0]]
    return plan.merge.apply(unit.unsqueeze(0), plan.kept.shape[1])[0]
