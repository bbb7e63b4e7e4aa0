"""Combine a method's plans into a decision, and turn it into the next stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.harness.engine.layout import Stage, left_padded, take

if TYPE_CHECKING:
    from espalier.methods.base import Assignment, Mixture, Plan

#: Rows of a batch.
Rows = list[int] | slice

#: Maps rows and their token count to their (b, n, D) visual tokens at the site.
TokensOf = Callable[[Rows, int], Tensor]


@dataclass(frozen=True)
class LayerHalves:
    """A layer run in halves: the visual tokens that entered it, and the output of its attention for them."""

    entering: TokensOf
    put_out: TokensOf


@dataclass(frozen=True)
class MergedTokens:
    """New values of kept tokens: `values` (b, k, D) belong to the tokens `kept` (b, k) of `rows`, computed by `merge`.

    `features` is True for values that are features, still to be projected.
    """

    rows: Rows
    kept: Tensor
    values: Tensor
    merge: Assignment | Mixture
    features: bool = False


@dataclass(frozen=True)
class Decision:
    """The plans of all rows at one site, combined.

    Attributes:
        kept: (B, K) index into the stage's alive visual tokens, ascending, padded on the right with 0.
        counts: kept tokens of each row.
        merged: new values of kept tokens, one entry for each group of rows with merging.
        spare: (B,) kept tokens that only fill up the count, -1 where the method does not report it.
    """

    kept: Tensor
    counts: tuple[int, ...]
    merged: tuple[MergedTokens, ...]
    spare: Tensor | None = None

    def keeps_all(self, stage: Stage) -> bool:
        """Return whether every alive token stays, so that nothing has to be gathered."""
        return self.counts == stage.counts


def merged_values(
    plan: Plan, merge: Assignment | Mixture, tokens: Tensor, rows: Rows, halves: LayerHalves | None
) -> Tensor:
    """Return the (b, k, D) values of a plan's kept tokens after `merge` of `tokens` (b, n, D).

    With halves and `plan.entering`, the states that entered the layer are merged instead, and the attention's output
    for the kept tokens is added.
    """
    if halves is None or not plan.entering:
        return merge.apply(tokens, plan.kept.shape[1])
    values = merge.apply(halves.entering(rows, tokens.shape[1]), plan.kept.shape[1])
    return values + take(halves.put_out(rows, tokens.shape[1]), plan.kept, -2)


def combine(
    plans: Sequence[tuple[Rows, Plan]], stage: Stage, merged: tuple[MergedTokens, ...]
) -> Decision:
    """Return the decision made of the plans of some rows each; rows without a plan keep no token."""
    every_row = range(len(stage.counts))
    counts = [0] * len(every_row)
    spare: Tensor | None = None
    for rows, plan in plans:
        for row in every_row[rows] if isinstance(rows, slice) else rows:
            counts[row] = plan.kept.shape[1]
        if plan.spare is not None:
            spare = stage.slots.new_full((len(counts),), -1) if spare is None else spare
            spare[rows] = plan.spare.to(spare)
    if len(plans) == 1 and isinstance(plans[0][0], slice):
        kept = plans[0][1].kept
    else:
        kept = stage.slots.new_zeros(len(counts), max(counts))
        for rows, plan in plans:
            kept[rows, : plan.kept.shape[1]] = plan.kept
    return Decision(kept, tuple(counts), merged, spare)


def write_merged(hidden: Tensor, slots: Tensor, decision: Decision) -> Tensor:
    """Return `hidden` (B, M, D) with merged values written at the slots of the kept tokens."""
    if not decision.merged:
        return hidden
    hidden = hidden.clone()
    for merged in decision.merged:
        index = take(slots[merged.rows], merged.kept, -1)
        rows = torch.arange(hidden.shape[0], device=hidden.device)[merged.rows]
        hidden[rows[:, None], index] = merged.values.to(hidden.dtype)
    return hidden


def survivors(stage: Stage, decision: Decision) -> Tensor:
    """Return (B, M): the slots that stay, i.e. every valid slot except the visual tokens not kept."""
    n_slots = stage.valid.shape[1]
    # Right-padded entries must not touch a real slot: they are written to an extra column that is cut off.
    alive = torch.nn.functional.pad(stage.valid, (0, 1))
    slots = _fill_padding(stage.slots, stage.counts, n_slots)
    alive.scatter_(1, slots, torch.zeros_like(slots, dtype=torch.bool))
    kept = _fill_padding(take(stage.slots, decision.kept, -1), decision.counts, n_slots)
    alive.scatter_(1, kept, torch.ones_like(kept, dtype=torch.bool))
    return alive[:, :n_slots]


def _fill_padding(slots: Tensor, counts: Sequence[int], filler: int) -> Tensor:
    """Replace the right padding of (B, N) slots by `filler`."""
    if all(count == slots.shape[1] for count in counts):
        return slots
    real = torch.arange(slots.shape[1], device=slots.device) < torch.tensor(
        counts, device=slots.device
    ).unsqueeze(1)
    return torch.where(real, slots, filler)


def shrink(
    stage: Stage, decision: Decision, text: Sequence[int], first: int
) -> tuple[Stage, Tensor]:
    """Drop tokens physically: return the next stage and the (B, M') slots to gather, left-padded.

    Args:
        stage: before the site.
        decision: plans of the site.
        text: tokens of each row that are neither padding nor prunable.
        first: decoder layer from which the next stage holds.
    """
    alive = survivors(stage, decision)
    lengths = [t + n for t, n in zip(text, decision.counts, strict=True)]
    index, valid, padded = left_padded(alive, lengths)
    offset = torch.tensor([index.shape[1] - n - 1 for n in lengths], device=alive.device)
    new_slot = alive.long().cumsum(1) + offset.unsqueeze(1)
    slots = take(new_slot, take(stage.slots, decision.kept, -1), -1).clamp(min=0)
    origin = take(stage.origin, decision.kept, -1)
    new_words = take(new_slot, stage.words.clamp(min=0), -1)
    words = torch.where(stage.words < 0, stage.words, new_words)
    blocks = None if stage.blocks is None else stage.blocks.gathered(index)
    following = Stage(first, valid, padded, slots, decision.counts, origin, words, blocks=blocks)
    return following, index


def hide(stage: Stage, decision: Decision, first: int) -> Stage:
    """Emulate dropping: slots stay in place, and dropped ones are hidden from later layers."""
    alive = survivors(stage, decision)
    slots = take(stage.slots, decision.kept, -1)
    origin = take(stage.origin, decision.kept, -1)
    words, blocks = stage.words, stage.blocks
    return Stage(first, alive, True, slots, decision.counts, origin, words, blocks=blocks)


def merge_into(store: Tensor, candidates: Tensor, onto: Tensor, shift: int = 0) -> None:
    """Average entries of a layer into others, in place.

    Args:
        store: (H_kv, L, D) keys or values of one sample.
        candidates: (N,) slots.
        onto: (H, N), H = 1 or H_kv: the candidate that each one is averaged into, itself if it stays, -1 if dropped.
        shift: for an evicted candidate, the entry `shift` slots before it is averaged instead (at least slot 0).
    """
    dtype = torch.promote_types(store.dtype, torch.float32)
    averaged = store[:, candidates].to(dtype)
    onto = onto.expand(averaged.shape[0], -1)
    if shift:
        positions = torch.arange(len(candidates), device=onto.device)
        before = store[:, (candidates - shift).clamp(min=0)].to(dtype)
        averaged = torch.where((onto == positions).unsqueeze(-1), averaged, before)
    target, weights = onto.clamp(min=0).unsqueeze(-1), (onto >= 0).unsqueeze(-1).to(dtype)
    added = target.expand_as(averaged)
    total = torch.zeros_like(averaged).scatter_add_(1, added, averaged * weights)
    count = torch.zeros_like(averaged[..., :1]).scatter_add_(1, target, weights)
    means = torch.where(count > 0, total / count.clamp(min=1), averaged)
    store[:, candidates] = means.to(store.dtype)
