"""A batch while its prompt runs: the tokens alive, and the method's plans combined into decisions that shorten it.

A decision shortens as well what some models add to visual tokens after the first decoder layers (`DeepStack`, arXiv
2406.04334): after layer l, the l-th of the features of earlier tower layers. The model finds these tokens by a mask
over the whole prompt, which no longer fits once some are dropped. The engine therefore takes the features out of the
decoder's arguments and adds them itself, to the tokens alive after that layer, at their current slots. A token merged
by a method gets features merged by the same plan, as if they had been part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from espalier.harness.cost.clock import Clock
from espalier.harness.cost.memory import fits_in_free_memory
from espalier.harness.engine.layer_inputs import closed_positions
from espalier.harness.engine.layout import Layout, Stage, fill_padding, groups, left_padded, take
from espalier.harness.engine.session_setup import SessionSetup
from espalier.methods.base import Assignment, Mixture, Plan, View
from espalier.methods.blame import Blame
from espalier.methods.chance import generators_of
from espalier.methods.select.cosines import judged_by


class Prefill:
    """State shared by the sites of one pass: the stages so far, and the methods that get and apply plans.

    The tokens alive are described by a growing list of stages. A denoising run makes one prefill for each step; methods
    see its number as `view.step`.

    Args:
        setup: method, model and settings.
        layout: of the batch.
        samples: one id for each row.
        step: number of the denoising step, 0 for a prefill.

    Raises:
        BudgetError: a row's budget cannot be met.
    """

    def __init__(
        self, setup: SessionSetup, layout: Layout, samples: tuple[str, ...], step: int = 0
    ) -> None:
        self.setup = setup
        self.step = step
        self.layout = layout
        self.samples = samples
        self.clock = Clock(*setup.adapter.devices, enabled=setup.timed)
        #: Tokens of the parts of each row that the method chooses in: its items, or all of it.
        self.parts = tuple(
            tuple(torch.bincount(picture[:count]).tolist()) if setup.by_item and count else (count,)
            for picture, count in zip(layout.picture, layout.counts, strict=True)
        )
        keep = partial(setup.budget.keep, setup.method, setup.adapter.facts)
        #: Tokens to keep of each part after each site, for each row.
        self._requested = tuple(
            tuple(keep(part, text) if part else (0,) * len(setup.sites) for part in parts)
            for parts, text in zip(self.parts, layout.text, strict=True)
        )
        #: Tokens to keep after each site, for each row.
        self.requested = [tuple(map(sum, zip(*parts, strict=True))) for parts in self._requested]
        #: Rows of the batch for each sample.
        self.beams = 1
        self.stages: list[Stage] = []
        #: Tokens really kept after each site, for each sample.
        self.kept: list[tuple[int, ...]] = []
        #: (B,) for each site that reports it: kept tokens that only fill up the count.
        self.spare: list[Tensor] = []
        #: Units of each sample that were projected twice.
        self.reprojected = (0,) * layout.rows
        #: Features that the first decoder layers add to visual tokens; None if there are none, or nothing is dropped.
        self.deepstack: DeepStack | None = None
        #: Whether the decoder stack is running the prompt.
        self.running = False

    def start(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Begin with every token alive; return the decoder's arguments without those that the engine takes over."""
        hidden = arguments["inputs_embeds"]
        self.running = True
        # The inputs may lie on the tower's card, which need not be the decoder's.
        self.layout = self.layout.on(hidden.device)
        positions = arguments["position_ids"].to(hidden.device)
        arguments = {**arguments, "position_ids": positions}
        self.beams = hidden.shape[0] // self.layout.rows
        layout = self.layout.repeat(self.beams)
        self.setup.signals.start(layout, hidden)
        if self.setup.collector is not None:
            depth, (rows, width) = len(self.setup.adapter.decoder.layers), layout.visual.shape
            self.setup.collector.begin(rows, width, depth)
        self.stages = [Stage.initial(layout)]
        if (types := self.setup.adapter.layer_types) is not None:
            types.begin(self.stage, layout, positions)
        if self.setup.sites:
            self.deepstack, arguments = extract_features(arguments, layout)
        return arguments

    @property
    def stage(self) -> Stage:
        """Tokens currently alive."""
        return self.stages[-1]

    def stage_of(self, layer: int) -> Stage:
        """Return the tokens that entered a decoder layer."""
        return next(stage for stage in reversed(self.stages) if stage.first <= layer)

    def active_stage(self) -> Stage | None:
        """Return the tokens alive while the decoder stack runs the prompt, None before and after."""
        return self.stage if self.running else None

    @property
    def shortened(self) -> bool:
        """Whether any token has been dropped."""
        return len(self.stages) > 1

    def tokens(self, hidden: Tensor) -> TokensOf:
        """Return a function that gathers some rows' visual tokens from (B, M, D) hidden states."""
        slots = self.stage.move(hidden.device).slots
        return lambda rows, n: take(hidden[rows], slots[rows][:, :n], -2)

    def decide(
        self,
        number: int,
        tokens_of: TokensOf,
        merge_onto: TokensOf | None = None,
        halves: LayerHalves | None = None,
    ) -> Decision:
        """Get the method's plans at site `number`, from one view for each group of rows with equal counts and budgets.

        An adaptive method may keep a different count in each row, and a curved one measure it, so each row gets its
        own view.

        Args:
            number: of the site.
            tokens_of: returns the visual tokens of some rows.
            merge_onto: at a site that shows features, returns the tokens to merge in rows with blended tokens.
            halves: at `block` sites, the states to merge instead of the view's tokens (`Plan.entering`).

        Raises:
            PlanError: a plan breaks its contract.
        """
        setup, stage, site = self.setup, self.stage, self.setup.sites[number]
        keep = [counts[number] for counts in self.requested for _ in range(self.beams)]
        names = [name for name in self.samples for _ in range(self.beams)]
        with self.clock.phase("select"), setup.conditions.collecting():
            layout = self.layout.repeat(self.beams).on(stage.valid.device)
            # By row, not by batch: a row must not depend on its neighbours.
            features = [merge_onto is not None and not blended for blended in layout.blended]
            by_row = setup.method.adaptive or setup.method.curved or setup.by_item
            group_keys = range(len(keep)) if by_row else (0,) * len(keep)
            row_groups = groups(list(zip(stage.counts, keep, features, group_keys, strict=True)))
            plans: list[tuple[Rows, Plan]] = []
            merged: list[MergedTokens] = []
            for (n_tokens, n_keep, of_features, _), members in row_groups:
                if n_tokens == 0:
                    continue
                rows: Rows = slice(None) if len(row_groups) == 1 else members
                origin = stage.origin[rows][:, :n_tokens]
                view = View(
                    site=site,
                    tokens=tokens_of(rows, n_tokens),
                    grid=take(layout.grid[rows], origin, -2),
                    signals=setup.signals.collect(site, layout, origin, rows),
                    generators=generators_of(
                        setup.method, setup.seed, [names[row] for row in members], number
                    ),
                    step=self.step,
                )
                if setup.method.curved:
                    n_keep = self._measured_keep(number, members[0], view)
                with judged_by(fits_in_free_memory):
                    plan = (
                        self._plan_by_item(number, members[0], view, layout, origin)
                        if setup.by_item
                        else setup.method.answer(view, n_keep)
                    )
                plans.append((rows, plan))
                if setup.collector is not None and plan.scores is not None:
                    setup.collector.add(site.shortens or 0, members, origin, plan.scores)
                if plan.merge is not None:
                    # Gathered again: a method that writes into its view changes nothing.
                    onto = merge_onto if merge_onto is not None and not of_features else tokens_of
                    values = merged_values(plan, plan.merge, onto(rows, n_tokens), rows, halves)
                    merged.append(MergedTokens(rows, plan.kept, values, plan.merge, of_features))
            return combine(plans, stage, tuple(merged))

    def _measured_keep(self, number: int, row: int, view: View) -> int:
        """Return the count of a curved method in one row, after what the method measures at this site."""
        setup, sample = self.setup, row // self.beams
        with Blame(setup.method, "measured", view.site):
            curve = setup.method.measured(view)
        if curve is not None:
            self.requested[sample] = setup.budget.keep(
                curve,
                setup.adapter.facts,
                self.layout.counts[sample],
                self.layout.text[sample],
                self.requested[sample][:number],
            )
        return self.requested[sample][number]

    def _plan_by_item(
        self, number: int, row: int, view: View, layout: Layout, origin: Tensor
    ) -> Plan:
        """Return the plan of one row, made of one for each of its items at a site before the decoder."""
        setup, sample = self.setup, row // self.beams
        plans, start = [], 0
        for count, kept in zip(self.parts[sample], self._requested[sample], strict=True):
            places = slice(start, start + count)
            grid = view.grid[:, places].clone()
            grid[..., 0] -= grid[..., 0].min()
            index = torch.arange(start, start + count, device=grid.device).unsqueeze(0)
            signals = setup.signals.collect(view.site, layout, take(origin, index, -1), [row])
            part = replace(
                view,
                tokens=view.tokens[:, places],
                grid=grid,
                signals=signals,
                # In the same state for each item.
                generators=generators_of(setup.method, setup.seed, [self.samples[sample]], number),
            )
            plans.append(setup.method.answer(part, kept[number]))
            start += count
        return joined(plans, self.parts[sample])

    def advance(self, first: int, decision: Decision) -> Tensor | None:
        """Enter the next stage, which holds from decoder layer `first` on.

        Returns:
            (B, M') the slots to gather, or None if nothing moves (all kept, or emulated).
        """
        stage = self.stage
        if self.deepstack is not None:
            self.deepstack.merge(decision, stage, first)
        self.kept.append(decision.counts[:: self.beams])
        if decision.spare is not None:
            self.spare.append(decision.spare[:: self.beams])
        if decision.keeps_all(stage):
            return None
        index = None
        if self.setup.emulate:
            following = hide(stage, decision, first)
        else:
            following, index = shrink(stage, decision, self.layout.repeat(self.beams).text, first)
        if self.setup.renumber and following.blocks is not None:
            closed = closed_positions(following.valid)
            following.blocks = replace(following.blocks, positions=closed, span=closed.shape[1])
        self.stages.append(following)
        return index

    def rotary(self, layer: int, hidden: Tensor, rotary: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tables of the current stage's slots in a layer that was given `rotary`."""
        types = self.setup.adapter.layer_types
        if types is None or not rotary:  # the final norm has none
            return self.stage.rotary or rotary
        return types.tables(self.stage, layer, hidden)

    def spares(self) -> Tensor | None:
        """Return (B,) the tokens of each row that only fill up, over all sites; None if the method never states it."""
        if not self.spare:
            return None
        site_spares = torch.stack([site.to(self.spare[0].device) for site in self.spare])
        return site_spares.clamp(min=0).sum(0)


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
    slots = fill_padding(stage.slots, stage.counts, n_slots)
    alive.scatter_(1, slots, torch.zeros_like(slots, dtype=torch.bool))
    kept = fill_padding(take(stage.slots, decision.kept, -1), decision.counts, n_slots)
    alive.scatter_(1, kept, torch.ones_like(kept, dtype=torch.bool))
    return alive[:, :n_slots]


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
    offset = (~valid).sum(1, keepdim=True) - 1
    new_slot = alive.long().cumsum(1) + offset
    slots = take(new_slot, take(stage.slots, decision.kept, -1), -1).clamp(min=0)
    origin = take(stage.origin, decision.kept, -1)
    new_words = take(new_slot, stage.words.clamp(min=0), -1)
    words = torch.where(stage.words < 0, stage.words, new_words)
    blocks = None if stage.blocks is None else stage.blocks.gathered(index)
    return Stage(first, valid, padded, slots, decision.counts, origin, words, blocks=blocks), index


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


#: Arguments of a decoder with DeepStack: a list of (V, D) features, and the (B, L) mask of the V tokens they are for.
FEATURES, MASK = "deepstack_visual_embeds", "visual_pos_masks"


class DeepStack:
    """The features of one batch: for each of the first decoder layers, one row for each original visual token.

    Args:
        layout: of the batch, its rows repeated for beams.
        features: for each layer (V, D) features of all visual tokens, row by row, each row in sequence order.

    Raises:
        ValueError: there are features for tokens that methods do not see.
    """

    def __init__(self, layout: Layout, features: Sequence[Tensor]) -> None:
        n_features, n_visual = len(features[0]), sum(layout.counts)
        if n_features != n_visual:
            raise ValueError(f"DeepStack features for {n_features} tokens, methods see {n_visual}")
        self._tables = [_table(layout, layer_features) for layer_features in features]

    def hook(
        self, layers: Iterable[nn.Module], stage: Callable[[], Stage | None]
    ) -> list[RemovableHandle]:
        """Add the features after the first layers; the caller removes the handles.

        Args:
            layers: of the decoder.
            stage: returns the current stage, None outside the prefill.
        """

        def add(number: int, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            active = stage()
            return None if active is None else self.add_features(number, output, active)

        pairs = zip(layers, range(len(self._tables)), strict=False)
        return [layer.register_forward_hook(partial(add, number)) for layer, number in pairs]

    def add_features(self, number: int, hidden: Tensor, stage: Stage) -> Tensor:
        """Return the states (B, M, D) after layer `number` with the features of the alive tokens added."""
        stage.move(hidden.device)
        rows, places = _real_entries(stage.counts, hidden.device)
        slots, origin = stage.slots[rows, places], stage.origin[rows, places]
        table = self._tables[number].to(hidden.device, hidden.dtype)
        hidden = hidden.clone()
        hidden[rows, slots] = hidden[rows, slots] + table[rows, origin]
        return hidden

    def merge(self, decision: Decision, stage: Stage, first: int) -> None:
        """Merge the features not yet added in the way that a decision merges the tokens.

        Args:
            decision: the plans of a site.
            stage: before the site.
            first: decoder layer with the input that the site shortens.
        """
        device, n_rows = stage.origin.device, len(stage.counts)
        for merged in decision.merged:
            rows = torch.arange(n_rows, device=device)[merged.rows]
            first_row = merged.rows[0] if isinstance(merged.rows, list) else 0
            origin = stage.origin[rows][:, : stage.counts[first_row]]
            kept = take(origin, merged.kept, -1)
            for number in range(first, len(self._tables)):
                table = self._tables[number].to(device)
                tokens = take(table[rows], origin, -2)
                table[rows[:, None], kept] = merged.merge.apply(tokens, merged.kept.shape[1])
                self._tables[number] = table


def extract_features(
    arguments: dict[str, Any], layout: Layout
) -> tuple[DeepStack | None, dict[str, Any]]:
    """Return the features among a decoder's arguments, None if there are none, and the arguments without them."""
    if not arguments.get(FEATURES):
        return None, arguments
    return DeepStack(layout, arguments[FEATURES]), {**arguments, FEATURES: None, MASK: None}


def _table(layout: Layout, features: Tensor) -> Tensor:
    """Return (B, N, D) of (V, D) features."""
    table = features.new_zeros(*layout.visual.shape, features.shape[-1])
    table[_real_entries(layout.counts, features.device)] = features
    return table


def _real_entries(counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return row and index of each entry that is not padding, row by row, made on the device."""
    rows = [torch.full((count,), row, device=device) for row, count in enumerate(counts)]
    return torch.cat(rows), torch.cat([torch.arange(count, device=device) for count in counts])


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
