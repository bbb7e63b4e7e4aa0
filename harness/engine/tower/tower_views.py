"""Asking a method inside the tower: one view for each group of pictures with equal counts, and its plan applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from espalier.harness.cost.free_memory import fits_in_free_memory
from espalier.harness.engine.image_rows import Owners, picture_counts
from espalier.harness.engine.layout import groups, take
from espalier.harness.engine.model_parts import Parts
from espalier.harness.engine.rollout import rollout
from espalier.harness.engine.tower.tower_images import Pictures, Towering, new_sizes
from espalier.harness.engine.tower_blocks import TowerBlock
from espalier.harness.errors import UserError
from espalier.methods.base import Plan, Site, TokenReducer, View
from espalier.methods.select.cosines import judged_by

#: Signals made of the queries and keys of tower blocks.
HEADS = frozenset({"block_keys", "rollout"})


def watched_blocks(
    adapter: Parts, method: TokenReducer, sites: Sequence[Site]
) -> Sequence[TowerBlock]:
    """Return the blocks whose queries and keys a method inside the tower reads, if it reads any.

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


class Asking:
    """Asks about the pictures of one call of the tower.

    Args:
        method: the reducer.
        sites: its tower sites, first to last.
        owners: whose the pictures are.
        requested: tokens to keep after each tower site, for each row.
        generator_of: called with (row, picture of the row, number of the site) for a seeded generator.
        how: how slots are kept.
    """

    def __init__(
        self,
        method: TokenReducer,
        sites: Sequence[Site],
        owners: Owners,
        requested: Sequence[Sequence[int]],
        generator_of: Callable[[int, int, int], torch.Generator],
        how: Towering,
    ) -> None:
        self._method = method
        self._sites = sites
        self._owners = owners
        self._generator_of = generator_of
        self._how = how
        self._side = math.isqrt(owners.lives.shape[1])
        self._keep = [
            picture_counts(owners.counts, owners.rows, [row[site] for row in requested])
            for site in range(len(sites))
        ]

    def reduce(self, site: int, pictures: Pictures) -> list[Pictures]:
        """Return what is left of some pictures behind site number `site`; those without a token left are gone.

        Raises:
            PlanError: a plan breaks its contract.
        """
        counts, keep = self._owners.counts, self._keep[site]
        of_tokens = [
            counts[member] if site == 0 else pictures.origin.shape[1] for member in pictures.members
        ]
        signals = self._signals(site, pictures)
        found = []
        for (n, n_keep), places in groups(
            [(n, keep[member]) for n, member in zip(of_tokens, pictures.members, strict=True)]
        ):
            if n_keep:
                some = self._shown(pictures, places, n)
                found.append(self._planned(site, some, signals, places, n_keep))
        return found

    # ------------------------------------------------------------------ one group

    def _shown(self, pictures: Pictures, places: list[int], n: int) -> tuple[Pictures, Tensor]:
        """Return some of the pictures with the `n` slots each that tokens are made of, and the (p, n) numbers of these.

        Slots are gone before a site at the first one only, where the order is that of the raster.
        """
        device = pictures.origin.device
        place = torch.tensor(places, device=device)
        members = [pictures.members[one] for one in places]
        origin, sizes, order = (
            table[place] for table in (pictures.origin, pictures.sizes, pictures.order)
        )
        own = torch.arange(origin.shape[1], device=device).expand_as(origin)
        if n < origin.shape[1]:
            lives = self._owners.lives.to(device)[torch.tensor(members, device=device)]
            own = lives.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :n]
        if n < order.shape[1]:
            order = torch.arange(n, device=device).expand_as(own)
        origin, sizes = take(origin, own, -1), take(sizes, own, -1)
        return Pictures(members, pictures.hidden[place], origin, sizes, order, []), own

    def _planned(
        self,
        site: int,
        shown: tuple[Pictures, Tensor],
        signals: dict[str, Tensor],
        places: list[int],
        n_keep: int,
    ) -> Pictures:
        some, own = shown
        slots = some.origin if self._how.emulate else own
        tokens = take(some.hidden[:, self._how.extra :], slots, -2)
        place = torch.tensor(places, device=own.device)
        seen = {
            name: take(value[place], own, -1 if value.dim() == 2 else -2)
            for name, value in signals.items()
        }
        with judged_by(fits_in_free_memory):
            plan = self._method.answer(self._view(site, some, tokens, seen), n_keep)
        hidden = self._hidden(plan, some.hidden, tokens, slots, n_keep)
        origin = take(some.origin, plan.kept, -1)
        ascending = torch.arange(n_keep, device=own.device).expand_as(origin)
        order = ascending if plan.order is None else plan.order
        return Pictures(some.members, hidden, origin, new_sizes(plan, some.sizes), order, [])

    def _view(self, site: int, some: Pictures, tokens: Tensor, seen: dict[str, Tensor]) -> View:
        row, column = some.origin // self._side, some.origin % self._side
        own = {
            "sizes": some.sizes,
            "sequence": pad(some.order, (self._how.extra, 0), value=-1),
        }
        return View(
            site=self._sites[site],
            tokens=tokens,
            grid=torch.stack([torch.zeros_like(row), torch.zeros_like(row), row, column], dim=2),
            signals={**own, **seen},
            generators=[self._generator(member, site) for member in some.members],
        )

    def _hidden(
        self, plan: Plan, rows: Tensor, tokens: Tensor, slots: Tensor, n_keep: int
    ) -> Tensor:
        """Return the residual stream with the kept slots alone; emulated: with new values in their slots."""
        extra = self._how.extra
        merge = plan.merge
        values = take(tokens, plan.kept, -2) if merge is None else merge.apply(tokens, n_keep)
        if not self._how.emulate:
            return torch.cat([rows[:, :extra], values], dim=1)
        kept_slots = take(slots, plan.kept, -1)
        hidden = rows.clone()
        hidden[:, extra:].scatter_(1, kept_slots.unsqueeze(-1).expand_as(values), values)
        return hidden

    def _generator(self, picture: int, site: int) -> torch.Generator:
        rows = self._owners.rows
        return self._generator_of(rows[picture], rows[:picture].count(rows[picture]), site)

    # ------------------------------------------------------------------ signals

    def _signals(self, site: int, pictures: Pictures) -> dict[str, Tensor]:
        """Return the signals of a site for each slot alive."""
        found: dict[str, Tensor] = {}
        slots = pictures.slots(self._how.emulate)
        for need in self._method.needs(self._sites[site]):
            if need.signal == "block_keys":
                key = pictures.heads[-1][1][:, :, self._how.extra :].mean(1)
                found[need.key] = take(key, slots, -2)
            elif need.signal == "rollout":
                found[need.key] = take(self._rollout(pictures), slots, -1)
        return found

    def _rollout(self, pictures: Pictures) -> Tensor:
        n_slots, extra = pictures.hidden.shape[1], self._how.extra
        query = pictures.heads[0][0]
        start = torch.zeros(len(query), 1, n_slots, device=query.device)
        start = start.to(torch.promote_types(query.dtype, torch.float32))
        alive = torch.ones(len(query), n_slots, dtype=torch.bool, device=query.device)
        if self._how.emulate:
            alive[:, extra:] = False
            alive[:, extra:].scatter_(
                1, pictures.origin, torch.ones_like(pictures.origin, dtype=torch.bool)
            )
        if extra:
            start[:, :, 0] = 1
        else:
            start[:, 0] = alive / alive.sum(1, keepdim=True)
        rows = rollout(pictures.heads, start, lambda _: alive[:, None, None])
        return rows[:, 0, extra:]
