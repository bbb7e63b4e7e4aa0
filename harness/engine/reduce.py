"""Get a method's plans and turn them into the next stage."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.harness.cost.free_memory import fits_beside
from espalier.harness.engine.layout import Layout, Stage, groups, left_padded, take
from espalier.harness.engine.signals import Signals
from espalier.methods.base import Assignment, Mixture, Site, TokenReducer, View
from espalier.methods.select.cosines import judged_by

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
    halves: LayerHalves | None = None,
) -> Decision:
    """Get `method`'s plans, from one rectangular view for each group of rows with equal counts and budgets.

    An adaptive method may keep a different count in each row, so each row gets its own view.

    Args:
        method: the reducer.
        site: where it acts.
        keep: tokens to keep, for each row.
        layout: of the batch.
        stage: tokens alive before the site.
        signals: captured so far.
        generators: one for each row.
        tokens_of: returns the visual tokens of some rows.
        merge_onto: at a site that shows features, returns the tokens to merge in rows with blended tokens.
        step: denoising step.
        halves: at `block` sites, the states to merge instead of the view's tokens (`Plan.entering`).

    Raises:
        PlanError: a plan breaks its contract.
    """
    n_rows = len(keep)
    counts = [0] * n_rows
    merged: list[MergedTokens] = []
    spare: Tensor | None = None
    pieces: list[tuple[Rows, Tensor]] = []
    # By row, not by batch: a row must not depend on its neighbours.
    features = [merge_onto is not None and not blended for blended in layout.blended]
    group_keys = range(n_rows) if method.adaptive else (0,) * n_rows
    row_groups = groups(list(zip(stage.counts, keep, features, group_keys, strict=True)))
    for (n_tokens, n_keep, of_features, _), members in row_groups:
        if n_tokens == 0:
            continue
        rows: Rows = slice(None) if len(row_groups) == 1 else members
        origin = stage.origin[rows][:, :n_tokens]
        view = View(
            site=site,
            tokens=tokens_of(rows, n_tokens),
            grid=take(layout.grid[rows], origin, -2),
            signals=signals.collect(site, layout, origin, rows),
            generators=[generators[row] for row in members],
            step=step,
        )
        with judged_by(fits_beside):
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
            merged.append(MergedTokens(rows, plan.kept, values, plan.merge, of_features))
    if len(pieces) == 1 and isinstance(pieces[0][0], slice):
        kept = pieces[0][1]
    else:
        kept = stage.slots.new_zeros(n_rows, max(counts))
        for rows, row_kept in pieces:
            kept[rows, : row_kept.shape[1]] = row_kept
    return Decision(kept, tuple(counts), tuple(merged), spare)


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
    return Stage(first, valid, padded, slots, decision.counts, origin, words), index


def hide(stage: Stage, decision: Decision, first: int) -> Stage:
    """Emulate dropping: slots stay in place, and dropped ones are hidden from later layers."""
    alive = survivors(stage, decision)
    slots = take(stage.slots, decision.kept, -1)
    origin = take(stage.origin, decision.kept, -1)
    return Stage(first, alive, True, slots, decision.counts, origin, stage.words)


def row_generators(seed: int, samples: Sequence[str], site: int) -> list[torch.Generator]:
    """Return one CPU generator for each row, seeded by (run seed, sample id, site number)."""
    generators = []
    for sample in samples:
        digest = hashlib.sha256(f"{seed}\0{sample}\0{site}".encode()).digest()
        generator = torch.Generator()
        generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        generators.append(generator)
    return generators
