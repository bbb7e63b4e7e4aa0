"""Asking a method for its plan and turning the plan into the next stage."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.harness.cost.free_memory import fits_in_free_memory
from espalier.harness.engine.layout import Layout, Stage, groups, left_padded, take
from espalier.harness.engine.signals import Signals
from espalier.methods.base import Assignment, Mixture, Site, TokenReducer, View
from espalier.methods.select.cosines import judged_by

#: Rows of a batch.
Rows = list[int] | slice

#: From rows and their token count to their (b, n, D) visual tokens at the site.
TokensOf = Callable[[Rows, int], Tensor]


@dataclass(frozen=True)
class Halves:
    """Where a layer runs in halves: the visual tokens as they entered it, and what its attention put out for them."""

    entering: TokensOf
    put_out: TokensOf


@dataclass(frozen=True)
class Merged:
    """New values of kept tokens: `values` (b, k, D) belong to the tokens `kept` (b, k) of `rows`.

    `merge` made them. `features` says that they are features, still to be projected.
    """

    rows: Rows
    kept: Tensor
    values: Tensor
    merge: Assignment | Mixture
    features: bool = False


@dataclass(frozen=True)
class Decision:
    """The plans of all rows at one site, put together.

    Attributes:
        kept: (B, K) index into the stage's alive visual tokens, ascending, padded on the right with 0.
        counts: kept tokens of each row.
        merged: new values of kept tokens, one entry for each group of rows whose method merges.
        spare: (B,) kept tokens that only fill up, -1 where the method does not say.
    """

    kept: Tensor
    counts: tuple[int, ...]
    merged: tuple[Merged, ...]
    spare: Tensor | None = None

    def keeps_all(self, stage: Stage) -> bool:
        """Whether every token alive stays, so that there is nothing to gather."""
        return self.counts == stage.counts


def decide(
    method: TokenReducer,
    site: Site,
    keep: Sequence[int],
    layout: Layout,
    stage: Stage,
    signals: Signals,
    generators: Sequence[torch.Generator],
    tokens_of: TokensOf,
    merge_onto: TokensOf | None = None,
    step: int = 0,
    halves: Halves | None = None,
) -> Decision:
    """Ask `method` for its plans, one rectangular view for each group of rows with equal counts and budgets.

    An adaptive method keeps another count in each row, so it is shown every row alone.

    Args:
        method: the reducer.
        site: where it acts.
        keep: tokens to keep, for each row.
        layout: of the batch.
        stage: tokens alive before the site.
        signals: captured so far.
        generators: one for each row.
        tokens_of: gives the visual tokens of some rows.
        merge_onto: at a site that shows features, gives the tokens that are merged in rows where those are blends.
        step: denoising step.
        halves: at `block` sites, what plans may merge in place of the view's tokens (`Plan.entering`).

    Raises:
        PlanError: a plan breaks its contract.
    """
    n_rows = len(keep)
    counts = [0] * n_rows
    merged: list[Merged] = []
    spare: Tensor | None = None
    pieces: list[tuple[Rows, Tensor]] = []
    # By row, not by batch: no row may depend on its neighbours.
    features = [merge_onto is not None and not blended for blended in layout.blended]
    alone = range(n_rows) if method.adaptive else (0,) * n_rows
    found = groups(list(zip(stage.counts, keep, features, alone, strict=True)))
    for (n_tokens, n_keep, of_features, _), members in found:
        if n_tokens == 0:
            continue
        rows: Rows = slice(None) if len(found) == 1 else members
        origin = stage.origin[rows][:, :n_tokens]
        view = View(
            site=site,
            tokens=tokens_of(rows, n_tokens),
            grid=take(layout.grid[rows], origin, -2),
            signals=signals.collect(site, layout, origin, rows),
            generators=[generators[row] for row in members],
            step=step,
        )
        with judged_by(fits_in_free_memory):
            plan = method.answer(view, n_keep)
        for row in members:
            counts[row] = plan.kept.shape[1]
        pieces.append((rows, plan.kept))
        if plan.spare is not None:
            spare = stage.slots.new_full((n_rows,), -1) if spare is None else spare
            spare[rows] = plan.spare.to(spare)
        if plan.merge is not None:
            onto = None if of_features else merge_onto
            tokens = view.tokens if onto is None else onto(rows, n_tokens)
            if plan.entering and halves is not None:
                tokens = halves.entering(rows, n_tokens)
            values = plan.merge.apply(tokens, plan.kept.shape[1])
            if plan.entering and halves is not None:
                values = values + take(halves.put_out(rows, n_tokens), plan.kept, -2)
            merged.append(Merged(rows, plan.kept, values, plan.merge, of_features))
    if len(pieces) == 1 and isinstance(pieces[0][0], slice):
        kept = pieces[0][1]
    else:
        kept = stage.slots.new_zeros(n_rows, max(counts))
        for rows, part in pieces:
            kept[rows, : part.shape[1]] = part
    return Decision(kept, tuple(counts), tuple(merged), spare)


def write_merged(hidden: Tensor, slots: Tensor, decision: Decision) -> Tensor:
    """Return `hidden` (B, M, D) with merged values written at the slots of the kept tokens."""
    if not decision.merged:
        return hidden
    hidden = hidden.clone()
    for part in decision.merged:
        index = take(slots[part.rows], part.kept, -1)
        rows = torch.arange(hidden.shape[0], device=hidden.device)[part.rows]
        hidden[rows[:, None], index] = part.values.to(hidden.dtype)
    return hidden


def survivors(stage: Stage, decision: Decision) -> Tensor:
    """Return (B, M): the slots that stay, which is every valid slot but the visual tokens not kept."""
    n_slots = stage.valid.shape[1]
    # Right-padded entries must not touch a real slot: they go to one extra column that is cut off again.
    alive = torch.nn.functional.pad(stage.valid, (0, 1))
    slots = _padded(stage.slots, stage.counts, n_slots)
    alive.scatter_(1, slots, torch.zeros_like(slots, dtype=torch.bool))
    kept = _padded(take(stage.slots, decision.kept, -1), decision.counts, n_slots)
    alive.scatter_(1, kept, torch.ones_like(kept, dtype=torch.bool))
    return alive[:, :n_slots]


def _padded(slots: Tensor, counts: Sequence[int], filler: int) -> Tensor:
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
    """Drop for real: return the next stage and the (B, M') slots to gather, left-padded.

    Args:
        stage: before the site.
        decision: what stays.
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
    moved = take(new_slot, stage.words.clamp(min=0), -1)
    words = torch.where(stage.words < 0, stage.words, moved)
    return Stage(first, valid, padded, slots, decision.counts, origin, words), index


def hide(stage: Stage, decision: Decision, first: int) -> Stage:
    """Emulate dropping: nothing moves, the dropped slots are only hidden from later layers."""
    alive = survivors(stage, decision)
    slots = take(stage.slots, decision.kept, -1)
    origin = take(stage.origin, decision.kept, -1)
    return Stage(first, alive, True, slots, decision.counts, origin, stage.words)


def row_generators(seed: int, samples: Sequence[str], site: int) -> list[torch.Generator]:
    """Return one CPU generator for each row, seeded by (run seed, sample id, site number)."""
    found = []
    for sample in samples:
        digest = hashlib.sha256(f"{seed}\0{sample}\0{site}".encode()).digest()
        generator = torch.Generator()
        generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        found.append(generator)
    return found
