"""State of a batch while its prompt runs: the tokens alive, and the method's decisions so far."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from espalier.harness.cost.clock import Clock
from espalier.harness.cost.free_memory import fits_in_free_memory
from espalier.harness.engine.deepstack import extract_features
from espalier.harness.engine.item_scope import item_counts, plan_by_item
from espalier.harness.engine.layout import Stage, groups, take
from espalier.harness.engine.positions import closed_positions
from espalier.harness.engine.reduce import (
    MergedTokens,
    combine,
    hide,
    merged_values,
    shrink,
)
from espalier.methods.base import View
from espalier.methods.blame import Blame
from espalier.methods.chance import row_generators
from espalier.methods.select.cosines import judged_by

if TYPE_CHECKING:
    from espalier.harness.engine.deepstack import DeepStack
    from espalier.harness.engine.layout import Layout
    from espalier.harness.engine.reduce import (
        Decision,
        LayerHalves,
        Rows,
        TokensOf,
    )
    from espalier.harness.engine.session_setup import SessionSetup
    from espalier.methods.base import Plan


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
            item_counts(picture, count) if setup.by_item and count else (count,)
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
        with self.clock.phase("select"):
            layout = self.layout.repeat(self.beams).on(stage.valid.device)
            generators = row_generators(setup.seed, names, number)
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
                    generators=[generators[row] for row in members],
                    step=self.step,
                )
                if setup.method.curved:
                    n_keep = self._measured_keep(number, members[0], view)
                with judged_by(fits_in_free_memory):
                    if setup.by_item:
                        plan = self._plan_by_item(number, members[0], view, layout, origin)
                    else:
                        plan = setup.method.answer(view, n_keep)
                plans.append((rows, plan))
                if setup.collector is not None and plan.scores is not None:
                    setup.collector.add(site.shortens or 0, members, origin, plan.scores)
                if plan.merge is not None:
                    # Gathered again: a method that writes into its view changes nothing.
                    onto = merge_onto if merge_onto is not None and not of_features else tokens_of
                    tokens = onto(rows, n_tokens)
                    values = merged_values(plan, plan.merge, tokens, rows, halves)
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
        """Return the plan of one row, chosen in each of its items at a site before the decoder."""
        setup, sample = self.setup, row // self.beams
        return plan_by_item(
            setup.method.answer,
            view,
            self.parts[sample],
            [counts[number] for counts in self._requested[sample]],
            lambda index: setup.signals.collect(view.site, layout, take(origin, index, -1), [row]),
            lambda: row_generators(setup.seed, [self.samples[sample]], number)[0],
        )

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
            text = self.layout.repeat(self.beams).text
            following, index = shrink(stage, decision, text, first)
        if self.setup.renumber and following.blocks is not None:
            closed = closed_positions(following.valid)
            span = closed.shape[1]
            following.blocks = replace(following.blocks, positions=closed, span=span)
        self.stages.append(following)
        return index

    def rotary(self, layer: int, hidden: Tensor, rotary: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tables of the current stage's slots in a layer that was given `rotary`."""
        types = self.setup.adapter.layer_types
        if types is None or not rotary:  # the final norm has none
            return self.stage.rotary or rotary
        return types.tables(self.stage, layer, hidden)

    def spares(self) -> list[int | None]:
        """Return for each row the tokens that only fill up, over all sites; None if the method never states it."""
        if not self.spare:
            return [None] * self.layout.rows
        site_spares = torch.stack([site.cpu() for site in self.spare])
        return list(site_spares.clamp(min=0).sum(0).tolist())
