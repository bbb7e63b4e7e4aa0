"""Methods inside the vision tower: blocks run on the slots still alive, and the grid is whole again behind the last.

What follows the tower (projector, stitching of crops, placeholders) counts on whole grids, so the output of the last
block is put back on the grid, zero where a patch is gone; the decoder's stage then drops the tokens of those patches
before layer 0. Patches that no token is made of (the padding of a high-resolution image) leave at the first site.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.engine.layout import Layout, groups, take
from harness.engine.owners import owners_of, picture_counts, row_units
from harness.engine.rollout import Heads, rollout
from harness.measure.available import fits_beside
from harness.measure.clock import Clock
from harness.measure.work import Work
from methods.base import Assignment, MethodError, Plan, Site, TokenReducer, View
from methods.select.cosines import judged_by

if TYPE_CHECKING:
    from harness.engine.blocks import TowerBlock

#: Signals made of the queries and keys of tower blocks.
HEADS = frozenset({"block_keys", "rollout"})


@dataclass(eq=False)
class Pictures:
    """Pictures with equally many slots, on their way through the blocks.

    Attributes:
        members: their numbers over the whole batch.
        hidden: (P, E + n, D) residual stream, E = 1 where the tower has a class token; emulated: all N slots.
        origin: (P, n) patch that each slot stands for, ascending.
        sizes: (P, n) how many patches each slot stands for.
        order: (P, n) slots in the order that the method's last plan gave them.
        heads: queries and keys of the blocks since the last site.
    """

    members: list[int]
    hidden: Tensor
    origin: Tensor
    sizes: Tensor
    order: Tensor
    heads: list[Heads]


class TowerRun:
    """Takes the place of the tower's blocks for one batch.

    Args:
        method: the reducer.
        sites: its tower sites, first to last.
        blocks: of the tower, up to the one that the projector reads.
        extra: 1 if slot 0 is a class token.
        layout: of the batch.
        requested: tokens to keep after each tower site, for each row.
        generator_of: called with (row, picture of the row, number of the site) for a seeded generator.
        emulate: keep all slots and mask what is gone, the slow reference.
        clock: phase timer.

    Raises:
        MethodError: a row's tokens are blends of several patches.
    """

    def __init__(
        self,
        method: TokenReducer,
        sites: Sequence[Site],
        blocks: Sequence[TowerBlock],
        extra: int,
        layout: Layout,
        requested: Sequence[Sequence[int]],
        generator_of: Callable[[int, int, int], torch.Generator],
        emulate: bool,
        clock: Clock,
    ) -> None:
        if any(layout.blended):
            raise MethodError(
                f"{type(method).__name__} acts inside the tower and needs tokens that are its patches; this sample's "
                "are blends of several patches (pooled frames, shrunk crops)"
            )
        self._method = method
        self._sites = {site.layer: number for number, site in enumerate(sites)}
        self._site_of = list(sites)
        self._blocks = blocks
        self._extra = extra
        self._layout = layout
        self._requested = requested
        self._generator_of = generator_of
        self._emulate = emulate
        self._clock = clock
        self._batch: list[Pictures] = []
        self._side = 0
        self._seen: Heads | None = None
        self._first_unit = 0
        self._keep: list[dict[int, int]] = []
        self._alive: list[Tensor] = []
        self._ran = [[0, 0, 0] for _ in range(layout.rows)]
        self._full = [[0, 0, 0] for _ in range(layout.rows)]
        self._saved: list[tuple[Any, Any]] = []

    # ------------------------------------------------------------------ life

    def __enter__(self) -> TowerRun:
        """Put the run in the place of the blocks' own forward."""
        for number, block in enumerate(self._blocks):
            self._saved.append((block.module, block.module.__dict__.get("forward")))
            block.module.__dict__["forward"] = partial(self._forward, number)
        return self

    def __exit__(self, *error: object) -> None:
        """Give the blocks their own forward back."""
        for module, forward in self._saved:
            del module.__dict__["forward"]
            if forward is not None:
                module.__dict__["forward"] = forward
        self._saved.clear()

    def watch(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Note queries and keys of the block that runs."""
        self._seen = (query, key, scaling)

    # ------------------------------------------------------------------ blocks

    def _forward(self, number: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run block `number`; what comes in is used by the first block only."""
        kwargs.pop("attention_mask", None)
        if number == 0:
            self._start(hidden)
        following = []
        for pictures in self._batch:
            following += self._run(number, pictures, kwargs)
        self._batch = following
        if number < len(self._blocks) - 1:
            return hidden  # of the right shape for whoever looks; nobody reads it
        return self._finish(hidden)

    def _start(self, hidden: Tensor) -> None:
        """Enter with (P, E + N, D) patch embeddings; which picture is whose is read off the layout."""
        n_pictures, n_units = hidden.shape[0], hidden.shape[1] - self._extra
        self._side = math.isqrt(n_units)
        self._owners = owners_of(self._layout, self._first_unit, n_pictures, n_units)
        self._keep = [
            picture_counts(
                self._owners.counts, self._owners.rows, [row[site] for row in self._requested]
            )
            for site in range(len(self._site_of))
        ]
        n_slots, blocks = hidden.shape[1], len(self._blocks)
        for row in self._owners.rows:
            for place, cost in enumerate((n_slots, n_slots, n_slots**2)):
                self._full[row][place] += blocks * cost
        origin = torch.arange(n_units, device=hidden.device).expand(n_pictures, -1)
        sizes = torch.ones(n_pictures, n_units, device=hidden.device)
        self._batch = [Pictures(list(range(n_pictures)), hidden, origin, sizes, origin, [])]

    def _run(self, number: int, pictures: Pictures, kwargs: dict[str, Any]) -> list[Pictures]:
        block = self._blocks[number]
        self._seen = None
        hidden = block.attend(pictures.hidden, self._mask(pictures), **kwargs)
        self._count(pictures, attended=True)
        pictures = replace(pictures, hidden=hidden)
        if self._seen is not None:
            pictures.heads.append(self._seen)
        found = [pictures]
        if number in self._sites:
            with self._clock.phase("select"):
                found = self._reduce(self._sites[number], pictures)
        for one in found:
            self._count(one, attended=False)
            one.hidden = block.transform(one.hidden)
        return found

    def _count(self, pictures: Pictures, attended: bool) -> None:
        """Note for each row the slots that a half of a block runs on."""
        n_slots = pictures.origin.shape[1] + self._extra
        for member in pictures.members:
            ran = self._ran[self._owners.rows[member]]
            if attended:
                ran[0] += n_slots
                ran[2] += n_slots**2
            else:
                ran[1] += n_slots

    def spared(self, row: int) -> Work:
        """Return what a row's pictures did not cost, in the fields of Work that say so."""
        attention, mlp, pairs = (
            full - ran for full, ran in zip(self._full[row], self._ran[row], strict=True)
        )
        return Work(spared_attention=attention, spared_mlp=mlp, spared_pairs=pairs)

    def _mask(self, pictures: Pictures) -> Tensor | None:
        """Return what is added to the logits: log-sizes if the method weighs by them, -inf where emulation hides."""
        hidden, extra = pictures.hidden, self._extra
        weighed = self._method.proportional
        if not weighed and not self._emulate:
            return None
        bias = hidden.new_zeros(hidden.shape[:2])
        logs = pictures.sizes.log() if weighed else torch.zeros_like(pictures.sizes)
        if self._emulate:
            bias[:, extra:] = -torch.inf
        bias[:, extra:].scatter_(1, self._slots(pictures), logs.to(bias.dtype))
        return bias[:, None, None]

    def _slots(self, pictures: Pictures) -> Tensor:
        """Return (P, n) where the slots alive stand behind the class token."""
        if self._emulate:
            return pictures.origin
        return torch.arange(pictures.origin.shape[1], device=pictures.origin.device).expand_as(
            pictures.origin
        )

    # ------------------------------------------------------------------ sites

    def _reduce(self, site: int, pictures: Pictures) -> list[Pictures]:
        """Ask the method, one view for each group of pictures with equal counts."""
        counts, keep = self._owners.counts, self._keep[site]
        of_tokens = [
            counts[member] if site == 0 else pictures.origin.shape[1] for member in pictures.members
        ]
        found = []
        signals = self._signals(site, pictures)
        for (n, n_keep), places in groups(
            [(n, keep[member]) for n, member in zip(of_tokens, pictures.members, strict=True)]
        ):
            if n_keep:
                found.append(self._plan(site, pictures, signals, places, n, n_keep))
        return found

    def _plan(
        self,
        site: int,
        pictures: Pictures,
        signals: dict[str, Tensor],
        places: list[int],
        n: int,
        n_keep: int,
    ) -> Pictures:
        device = pictures.origin.device
        members = [pictures.members[place] for place in places]
        place = torch.tensor(places, device=device)
        origin, sizes = pictures.origin[place], pictures.sizes[place]
        own = torch.arange(origin.shape[1], device=device).expand_as(origin)
        if n < origin.shape[1]:
            lives = self._owners.lives.to(device)[torch.tensor(members, device=device)]
            own = lives.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :n]
        # Slots are gone before a site at the first one only, where the order is that of the raster.
        order = pictures.order[place]
        if n < order.shape[1]:
            order = torch.arange(n, device=device).expand_as(own)
        origin, sizes = take(origin, own, -1), take(sizes, own, -1)
        slots = self._slots(replace(pictures, origin=origin)) if self._emulate else own
        rows = pictures.hidden[place]
        tokens = take(rows[:, self._extra :], slots, -2)
        row, column = origin // self._side, origin % self._side
        view = View(
            site=self._site_of[site],
            tokens=tokens,
            grid=torch.stack([torch.zeros_like(row), torch.zeros_like(row), row, column], dim=2),
            signals={
                "sizes": sizes,
                "sequence": pad(order, (self._extra, 0), value=-1),
                **{
                    name: take(value[place], own, -1 if value.dim() == 2 else -2)
                    for name, value in signals.items()
                },
            },
            generators=[self._generator(member, site) for member in members],
        )
        with judged_by(fits_beside):
            plan = self._method.answer(view, n_keep)
        values = tokens if plan.merge is None else plan.merge.apply(tokens, n_keep)
        if plan.merge is None:
            values = take(tokens, plan.kept, -2)
        kept_slots = take(slots, plan.kept, -1)
        if self._emulate:
            hidden = rows.clone()
            hidden[:, self._extra :].scatter_(1, kept_slots.unsqueeze(-1).expand_as(values), values)
        else:
            hidden = torch.cat([rows[:, : self._extra], values], dim=1)
        origin, sizes = take(origin, plan.kept, -1), _new_sizes(plan, sizes)
        ascending = torch.arange(n_keep, device=device).expand_as(origin)
        order = ascending if plan.order is None else plan.order
        return Pictures(members, hidden, origin, sizes, order, [])

    def _generator(self, picture: int, site: int) -> torch.Generator:
        rows = self._owners.rows
        return self._generator_of(rows[picture], rows[:picture].count(rows[picture]), site)

    def _signals(self, site: int, pictures: Pictures) -> dict[str, Tensor]:
        """Return the signals of a site for each slot alive."""
        found: dict[str, Tensor] = {}
        slots = self._slots(pictures)
        for need in self._method.needs(self._site_of[site]):
            if need.signal == "block_keys":
                key = pictures.heads[-1][1][:, :, self._extra :].mean(1)
                found[need.key] = take(key, slots, -2)
            elif need.signal == "rollout":
                found[need.key] = take(self._rollout(pictures), slots, -1)
        return found

    def _rollout(self, pictures: Pictures) -> Tensor:
        n_slots, extra = pictures.hidden.shape[1], self._extra
        query = pictures.heads[0][0]
        start = torch.zeros(len(query), 1, n_slots, device=query.device)
        start = start.to(torch.promote_types(query.dtype, torch.float32))
        alive = torch.ones(len(query), n_slots, dtype=torch.bool, device=query.device)
        if self._emulate:
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

    # ------------------------------------------------------------------ end

    def kept(self) -> list[Tensor]:
        """Return for each row the indices of the visual tokens whose patches are alive, ascending."""
        alive = torch.cat([some.cpu() for some in self._alive])
        units = (row_units(self._layout, row).cpu() for row in range(self._layout.rows))
        return [alive[own].nonzero()[:, 0] for own in units]

    def _finish(self, like: Tensor) -> Tensor:
        """Put the slots back on the grids (P, E + N, D) of `like`, zero where a patch is gone."""
        n_units = like.shape[1] - self._extra
        whole = torch.zeros_like(like)
        alive = torch.zeros(like.shape[0], n_units, dtype=torch.bool, device=like.device)
        for pictures in self._batch:
            place = torch.tensor(pictures.members, device=like.device)
            values = pictures.hidden[:, self._extra :]
            values = take(values, self._slots(pictures), -2)
            grid = values.new_zeros(len(place), n_units, values.shape[2])
            grid.scatter_(1, pictures.origin.unsqueeze(-1).expand_as(values), values)
            whole[place] = torch.cat([pictures.hidden[:, : self._extra], grid], dim=1)
            on = alive[place].scatter(
                1, pictures.origin, torch.ones_like(pictures.origin, dtype=torch.bool)
            )
            alive[place] = on
        self._alive.append(alive.flatten())
        self._first_unit += alive.numel()
        self._batch = []
        return whole


def _new_sizes(plan: Plan, sizes: Tensor) -> Tensor:
    if plan.merge is None:
        return take(sizes, plan.kept, -1)
    if isinstance(plan.merge, Assignment):
        whole = Assignment(plan.merge.slot, torch.ones_like(sizes))
        return whole.apply(sizes.unsqueeze(-1), plan.kept.shape[1]).squeeze(-1)
    return plan.merge.apply(sizes.unsqueeze(-1), plan.kept.shape[1]).squeeze(-1)
