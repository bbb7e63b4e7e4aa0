"""Methods inside the vision tower: blocks run on the alive slots, and the last block's output is a full grid again.

The modules after the tower (projector, stitching of crops, placeholders) need full grids, so the output of the last
block is put back on the grid, zero where a patch was dropped; the decoder's stage then drops the tokens of those
patches before layer 0. Patches that no token is made of (the padding of a high-resolution image) are dropped at the
first site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from espalier.harness.cost.clock import Clock
from espalier.harness.cost.row_work import Work
from espalier.harness.engine.image_rows import ImageOwners, image_owners, row_units
from espalier.harness.engine.layout import Layout
from espalier.harness.engine.rollout import LayerHeads
from espalier.harness.engine.tower.tower_images import SlotPolicy, TowerImages, restore_grids
from espalier.harness.engine.tower.tower_views import TowerPlanner
from espalier.harness.engine.tower_blocks import TowerBlock
from espalier.methods.base import MethodError, Site, TokenReducer


class TowerRun:
    """Replaces the tower's blocks for one batch.

    Args:
        method: the reducer.
        sites: its tower sites, first to last.
        blocks: of the tower, up to the one that the projector reads.
        extra: 1 if slot 0 is a class token.
        layout: of the batch.
        requested: tokens to keep after each tower site, for each row.
        generator_of: called with (row, image of the row, number of the site) for a seeded generator.
        emulate: keep all slots and mask dropped ones, the slow reference.
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
        self._policy = SlotPolicy(extra, emulate, method.proportional)
        self._site_at = {site.layer: number for number, site in enumerate(sites)}
        self._make_planner = partial(
            TowerPlanner,
            method,
            sites,
            requested=requested,
            generator_of=generator_of,
            policy=self._policy,
        )
        self._blocks = blocks
        self._layout = layout
        self._clock = clock
        self._batch: list[TowerImages] = []
        self._owners: ImageOwners
        self._planner: TowerPlanner
        self._block_heads: LayerHeads | None = None
        self._first_unit = 0
        self._alive: list[Tensor] = []
        self._ran = [[0, 0, 0] for _ in range(layout.rows)]
        self._full = [[0, 0, 0] for _ in range(layout.rows)]
        self._saved: list[tuple[Any, Any]] = []

    # ------------------------------------------------------------------ life

    def __enter__(self) -> TowerRun:
        """Replace the blocks' forward."""
        for number, block in enumerate(self._blocks):
            self._saved.append((block.module, block.module.__dict__.get("forward")))
            block.module.__dict__["forward"] = partial(self._forward, number)
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the blocks' forward."""
        for module, forward in self._saved:
            del module.__dict__["forward"]
            if forward is not None:
                module.__dict__["forward"] = forward
        self._saved.clear()

    def watch(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Store queries and keys of the running block."""
        self._block_heads = (query, key, scaling)

    # ------------------------------------------------------------------ blocks

    def _forward(self, number: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run block `number`; only the first block uses its input."""
        kwargs.pop("attention_mask", None)
        if number == 0:
            self._start(hidden)
        following = []
        for pictures in self._batch:
            following += self._run(number, pictures, kwargs)
        self._batch = following
        if number < len(self._blocks) - 1:
            return hidden  # unused, but hooks may check its shape
        return self._finish(hidden)

    def _start(self, hidden: Tensor) -> None:
        """Start with (P, E + N, D) patch embeddings; the row of each image is read from the layout."""
        n_pictures, n_units = hidden.shape[0], hidden.shape[1] - self._policy.extra
        self._owners = image_owners(self._layout, self._first_unit, n_pictures, n_units)
        self._planner = self._make_planner(owners=self._owners)
        n_slots, blocks = hidden.shape[1], len(self._blocks)
        for row in self._owners.rows:
            for index, cost in enumerate((n_slots, n_slots, n_slots**2)):
                self._full[row][index] += blocks * cost
        self._batch = [TowerImages.all_alive(hidden, self._policy.extra)]

    def _run(self, number: int, pictures: TowerImages, kwargs: dict[str, Any]) -> list[TowerImages]:
        block = self._blocks[number]
        self._block_heads = None
        hidden = block.attend(pictures.hidden, pictures.bias(self._policy), **kwargs)
        self._count(pictures, attended=True)
        pictures = replace(pictures, hidden=hidden)
        if self._block_heads is not None:
            pictures.heads.append(self._block_heads)
        groups = [pictures]
        if number in self._site_at:
            with self._clock.phase("select"):
                groups = self._planner.reduce(self._site_at[number], pictures)
        for group in groups:
            self._count(group, attended=False)
            group.hidden = block.transform(group.hidden)
        return groups

    def _finish(self, like: Tensor) -> Tensor:
        """Put the slots back on the grids (P, E + N, D) of `like`."""
        grids, alive = restore_grids(self._batch, like, self._policy)
        self._alive.append(alive.flatten())
        self._first_unit += alive.numel()
        self._batch = []
        return grids

    # ------------------------------------------------------------------ what came of it

    def kept(self) -> list[Tensor]:
        """Return for each row the indices of the visual tokens whose patches are alive, ascending."""
        alive = torch.cat([call_alive.cpu() for call_alive in self._alive])
        units = (row_units(self._layout, row).cpu() for row in range(self._layout.rows))
        return [alive[row_indices].nonzero()[:, 0] for row_indices in units]

    def _count(self, pictures: TowerImages, attended: bool) -> None:
        """Count for each row the slots that a half of a block runs on."""
        n_slots = pictures.origin.shape[1] + self._policy.extra
        for member in pictures.members:
            ran = self._ran[self._owners.rows[member]]
            if attended:
                ran[0] += n_slots
                ran[2] += n_slots**2
            else:
                ran[1] += n_slots

    def spared(self, row: int) -> Work:
        """Return the cost that a row's images saved, in the `spared_*` fields of Work."""
        attention, mlp, pairs = (
            full - ran for full, ran in zip(self._full[row], self._ran[row], strict=True)
        )
        return Work(spared_attention=attention, spared_mlp=mlp, spared_pairs=pairs)
