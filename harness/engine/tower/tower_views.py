"""Call a method inside the tower: one view for each group of images with equal counts, and its plan applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from espalier.harness.cost.free_memory import fits_in_free_memory
from espalier.harness.engine.layout import groups, take
from espalier.harness.engine.rollout import rollout
from espalier.harness.engine.tower.tower_images import (
    TowerImages,
    new_sizes,
    picture_counts,
)
from espalier.harness.errors import UserError
from espalier.methods.base import View
from espalier.methods.select.cosines import judged_by

if TYPE_CHECKING:
    from espalier.harness.engine.model_parts import ModelParts
    from espalier.harness.engine.tower.tower_images import (
        ImageOwners,
        SlotPolicy,
    )
    from espalier.harness.engine.tower_blocks import TowerBlock
    from espalier.methods.base import Plan, Site, TokenReducer

#: Signals made of the queries and keys of tower blocks.
HEADS = frozenset({"block_keys", "rollout", "flow"})


def watched_blocks(
    adapter: ModelParts, method: TokenReducer, sites: Sequence[Site]
) -> Sequence[TowerBlock]:
    """Return the blocks with queries and keys that a method inside the tower reads, if any.

    Raises:
        UserError: the model has no such blocks, or its kernel takes no bias for sizes.
    """
    if not sites:
        return []
    blocks = adapter.tower_blocks()
    kernel = blocks[0].kernel
    if method.proportional and kernel.startswith("flash"):
        raise UserError(
            f"model.attention={kernel!r} takes no bias for sizes (proportional attention); valid: sdpa"
        )
    read = {need.signal for site in sites for need in method.needs(site)}
    return blocks[: sites[-1].layer + 1] if read & HEADS else []


class TowerPlanner:
    """Gets and applies plans for the images of one tower call.

    Args:
        method: the reducer.
        sites: its tower sites, first to last.
        owners: batch rows of the images.
        requested: tokens to keep after each tower site, for each row.
        generator_of: called with (row, image of the row, number of the site) for a seeded generator.
        policy: how slots are kept.
        pixels: (P, N, F) in [0, 1] of the images' patches; None: the method does not read them.
    """

    def __init__(
        self,
        method: TokenReducer,
        sites: Sequence[Site],
        owners: ImageOwners,
        requested: Sequence[Sequence[int]],
        generator_of: Callable[[int, int, int], torch.Generator],
        policy: SlotPolicy,
        pixels: Tensor | None = None,
    ) -> None:
        self._pixels = pixels
        self._method = method
        self._sites = sites
        self._owners = owners
        self._generator_of = generator_of
        self._policy = policy
        #: Whether the method reads the information flow.
        self.reads_flow = any(
            need.signal == "flow" for site in sites for need in method.needs(site)
        )
        self._side = math.isqrt(owners.lives.shape[1])
        self._keep = [
            picture_counts(owners.counts, owners.rows, [row[site] for row in requested])
            for site in range(len(sites))
        ]

    def reduce(self, site: int, pictures: TowerImages) -> list[TowerImages]:
        """Return the images after site number `site`; images without a remaining token are dropped.

        Raises:
            PlanError: a plan breaks its contract.
        """
        counts, keep = self._owners.counts, self._keep[site]
        token_counts = [
            counts[member] if site == 0 else pictures.origin.shape[1] for member in pictures.members
        ]
        signals = self._signals(site, pictures)
        reduced = []
        for (n_tokens, n_keep), members in groups(
            [
                (n_tokens, keep[member])
                for n_tokens, member in zip(token_counts, pictures.members, strict=True)
            ]
        ):
            if n_keep:
                group = self._select_slots(pictures, members, n_tokens)
                reduced.append(self._apply_plan(site, group, signals, members, n_keep))
        return reduced

    # ------------------------------------------------------------------ one group

    def _select_slots(
        self, pictures: TowerImages, members: list[int], n: int
    ) -> tuple[TowerImages, Tensor]:
        """Return some images with the `n` slots each that tokens are made of, and the (p, n) indices of these slots.

        Slots are dropped before a site at the first one only, where the order is that of the raster.
        """
        device = pictures.origin.device
        index = torch.tensor(members, device=device)
        picture_numbers = [pictures.members[member] for member in members]
        origin, sizes, order = (
            table[index] for table in (pictures.origin, pictures.sizes, pictures.order)
        )
        indices = torch.arange(origin.shape[1], device=device).expand_as(origin)
        if n < origin.shape[1]:
            lives = self._owners.lives.to(device)[torch.tensor(picture_numbers, device=device)]
            indices = lives.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :n]
        if n < order.shape[1]:
            order = torch.arange(n, device=device).expand_as(indices)
        origin, sizes = take(origin, indices, -1), take(sizes, indices, -1)
        return TowerImages(
            picture_numbers, pictures.hidden[index], origin, sizes, order, []
        ), indices

    def _apply_plan(
        self,
        site: int,
        group: tuple[TowerImages, Tensor],
        signals: dict[str, Tensor],
        members: list[int],
        n_keep: int,
    ) -> TowerImages:
        images, indices = group
        slots = images.origin if self._policy.emulate else indices
        tokens = take(images.hidden[:, self._policy.extra :], slots, -2)
        index = torch.tensor(members, device=indices.device)
        group_signals = {
            name: take(value[index], indices, -1 if value.dim() == 2 else -2)
            for name, value in signals.items()
        }
        with judged_by(fits_in_free_memory):
            view = self._view(site, images, tokens.clone(), group_signals)
            plan = self._method.answer(view, n_keep)
        hidden = self._hidden(plan, images.hidden, tokens, slots, n_keep)
        origin = take(images.origin, plan.kept, -1)
        ascending = torch.arange(n_keep, device=indices.device).expand_as(origin)
        order = ascending if plan.order is None else plan.order
        sizes, flow = new_sizes(plan, images.sizes), group_signals.get("flow")
        flow = None if flow is None else take(flow, plan.kept, -1)
        return TowerImages(images.members, hidden, origin, sizes, order, [], flow)

    def _view(
        self, site: int, images: TowerImages, tokens: Tensor, signals: dict[str, Tensor]
    ) -> View:
        row, column = images.origin // self._side, images.origin % self._side
        image_signals = {
            "sizes": images.sizes.clone(),
            "sequence": pad(images.order, (self._policy.extra, 0), value=-1),
        }
        return View(
            site=self._sites[site],
            tokens=tokens,
            grid=torch.stack([torch.zeros_like(row), torch.zeros_like(row), row, column], dim=2),
            signals={**image_signals, **signals},
            generators=[self._generator(member, site) for member in images.members],
        )

    def _hidden(
        self, plan: Plan, rows: Tensor, tokens: Tensor, slots: Tensor, n_keep: int
    ) -> Tensor:
        """Return the residual stream of the kept slots; emulated: all slots, with new values in the kept ones."""
        extra = self._policy.extra
        merge = plan.merge
        values = take(tokens, plan.kept, -2) if merge is None else merge.apply(tokens, n_keep)
        if not self._policy.emulate:
            return torch.cat([rows[:, :extra], values], dim=1)
        kept_slots = take(slots, plan.kept, -1)
        hidden = rows.clone()
        hidden[:, extra:].scatter_(1, kept_slots.unsqueeze(-1).expand_as(values), values)
        return hidden

    def _generator(self, picture: int, site: int) -> torch.Generator:
        rows = self._owners.rows
        return self._generator_of(rows[picture], rows[:picture].count(rows[picture]), site)

    # ------------------------------------------------------------------ signals

    def _signals(self, site: int, pictures: TowerImages) -> dict[str, Tensor]:
        """Return the signals of a site for each slot alive."""
        signals: dict[str, Tensor] = {}
        slots = pictures.slots(self._policy.emulate)
        for need in self._method.needs(self._sites[site]):
            if need.signal == "block_keys":
                key = pictures.heads[-1][1][:, :, self._policy.extra :].mean(1)
                signals[need.key] = take(key, slots, -2)
            elif pictures.flow is not None and need.signal == "flow":
                signals[need.key] = pictures.flow
            elif self._pixels is not None and need.signal == "pixels":
                signals[need.key] = take(self._pixels[pictures.members], pictures.origin, -2)
            elif need.signal == "rollout":
                signals[need.key] = take(self._rollout(pictures), slots, -1)
        return signals

    def _rollout(self, pictures: TowerImages) -> Tensor:
        n_slots, extra = pictures.hidden.shape[1], self._policy.extra
        query = pictures.heads[0][0]
        start = torch.zeros(len(query), 1, n_slots, device=query.device)
        start = start.to(torch.promote_types(query.dtype, torch.float32))
        alive = torch.ones(len(query), n_slots, dtype=torch.bool, device=query.device)
        if self._policy.emulate:
            alive[:, extra:] = False
            alive[:, extra:].scatter_(
                1, pictures.origin, torch.ones_like(pictures.origin, dtype=torch.bool)
            )
        if extra:
            start[:, :, 0] = 1
        else:
            start[:, 0] = alive / alive.sum(1, keepdim=True)
        rows = rollout(pictures.heads, start, lambda *_: alive[:, None, None])
        return rows[:, 0, extra:]
