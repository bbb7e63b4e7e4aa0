"""`tower` sites: blocks of the vision tower run on fewer slots, and the input of decoder layer 0 is shortened.

The modules after the tower (projector, stitching of crops, placeholders) need full grids, so the output of the last
block is put back on the grid, zero where a patch was dropped; the decoder's stage then drops the tokens of those
patches before layer 0. Patches that no token is made of (the padding of a high-resolution image) are dropped at the
first site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from espalier.harness.cost.row_work import NO_WORK, Work
from espalier.harness.engine.reduce import Decision
from espalier.harness.engine.replaced_forward import replaced_forwards
from espalier.harness.engine.sites.prefix import gather_arguments
from espalier.harness.engine.sites.site import Sites
from espalier.harness.engine.tower.flow import flow_after
from espalier.harness.engine.tower.patch_pixels import PatchPixels
from espalier.harness.engine.tower.tower_images import (
    SlotPolicy,
    TowerImages,
    image_owners,
    restore_grids,
    row_units,
)
from espalier.harness.engine.tower.tower_views import TowerPlanner
from espalier.methods.base import MethodError
from espalier.methods.chance import row_generators

if TYPE_CHECKING:
    from espalier.harness.cost.clock import Clock
    from espalier.harness.engine.layout import Layout
    from espalier.harness.engine.prefill import Prefill
    from espalier.harness.engine.rollout import LayerHeads
    from espalier.harness.engine.sites.site import Arguments, NumberedSite
    from espalier.harness.engine.tower.tower_images import (
        ImageOwners,
    )
    from espalier.harness.engine.tower_blocks import TowerBlock
    from espalier.methods.base import Site, TokenReducer


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
        patches: pixels of the patches, if the method reads them.

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
        patches: PatchPixels | None = None,
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
        self._patches = patches
        self._batch: list[TowerImages] = []
        self._owners: ImageOwners
        self._planner: TowerPlanner
        self._block_heads: LayerHeads | None = None
        self._first_unit = 0
        self._alive: list[Tensor] = []
        self._ran = [[0, 0, 0] for _ in range(layout.rows)]
        self._full = [[0, 0, 0] for _ in range(layout.rows)]
        self._replaced = ExitStack()

    # ------------------------------------------------------------------ life

    def __enter__(self) -> TowerRun:
        """Replace the blocks' forward."""
        if self._patches is not None:
            self._patches.open()
        pairs = ((block.module, partial(self._forward, n)) for n, block in enumerate(self._blocks))
        self._replaced.enter_context(replaced_forwards(pairs))
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the blocks' forward."""
        if self._patches is not None:
            self._patches.close()
        self._replaced.close()

    def watch(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Store queries and keys of the running block."""
        self._block_heads = (query, key, scaling)

    # ------------------------------------------------------------------ blocks

    def _forward(self, number: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run block `number`; only the first block uses its input, the others its device."""
        kwargs.pop("attention_mask", None)
        if number == 0:
            self._start(hidden)
        following = []
        for pictures in self._batch:
            following += self._run(number, pictures.move(hidden.device), kwargs)
        self._batch = following
        if number < len(self._blocks) - 1:
            return hidden  # unused, but hooks may check its shape
        return self._finish(hidden)

    def _start(self, hidden: Tensor) -> None:
        """Start with (P, E + N, D) patch embeddings; the row of each image is read from the layout."""
        n_pictures, n_units = hidden.shape[0], hidden.shape[1] - self._policy.extra
        self._owners = image_owners(self._layout, self._first_unit, n_pictures, n_units)
        pixels = None if self._patches is None else self._patches.pixels
        self._planner = self._make_planner(owners=self._owners, pixels=pixels)
        n_slots, blocks = hidden.shape[1], len(self._blocks)
        for row in self._owners.rows:
            for index, cost in enumerate((n_slots, n_slots, n_slots**2)):
                self._full[row][index] += blocks * cost
        images = TowerImages.all_alive(hidden, self._policy.extra)
        self._batch = self._reduce(-1, images) if -1 in self._site_at else [images]

    def _run(self, number: int, pictures: TowerImages, kwargs: dict[str, Any]) -> list[TowerImages]:
        block = self._blocks[number]
        self._block_heads = None
        entering = pictures.hidden
        hidden = block.attend(entering, pictures.bias(self._policy), **kwargs)
        self._count(pictures, attended=True)
        pictures = replace(pictures, hidden=hidden)
        if self._block_heads is not None:
            pictures.heads.append(self._block_heads)
            if self._planner.reads_flow:
                with self._clock.phase("select"):
                    values = block.values(entering)
                    pictures.flow = flow_after(pictures, values, self._policy)
        groups = self._reduce(number, pictures) if number in self._site_at else [pictures]
        for group in groups:
            self._count(group, attended=False)
            group.hidden = block.transform(group.hidden)
        return groups

    def _reduce(self, block: int, pictures: TowerImages) -> list[TowerImages]:
        with self._clock.phase("select"):
            return self._planner.reduce(self._site_at[block], pictures)

    def _finish(self, like: Tensor) -> Tensor:
        """Put the slots back on the grids (P, E + N, D) of `like`."""
        grids, alive = restore_grids(self._batch, like, self._policy)
        self._alive.append(alive.flatten())
        self._first_unit += alive.numel()
        self._batch = []
        return grids

    # ------------------------------------------------------------------ results

    def kept(self) -> list[Tensor]:
        """Return for each row the indices of the visual tokens that are alive, ascending."""
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


class TowerSites(Sites):
    """The method plans image by image inside the tower, where a `TowerRun` replaces the blocks.

    Args:
        prefill: the batch.
        sites: all of the method's tower sites.

    Raises:
        MethodError: a row's tokens are blends of several patches.
    """

    in_tower = True

    def __init__(self, prefill: Prefill, sites: Sequence[NumberedSite]) -> None:
        super().__init__(prefill, sites)
        #: Runs the tower's blocks; None if nothing is dropped inside the tower.
        self.run: TowerRun | None = None
        setup, layout = prefill.setup, prefill.layout
        if all(
            count == visual
            for counts, visual in zip(prefill.requested, layout.counts, strict=True)
            for count in counts[: len(sites)]
        ):
            return
        tower_sites = [site for _, site in sites]
        self.run = TowerRun(
            method=setup.method,
            sites=tower_sites,
            blocks=setup.adapter.tower_blocks(),
            extra=int(setup.adapter.facts.class_attention == "token"),
            layout=layout,
            requested=prefill.requested,
            generator_of=lambda row, picture, site: row_generators(
                setup.seed, [f"{prefill.samples[row]}/{picture}"], site
            )[0],
            emulate=setup.emulate,
            clock=prefill.clock,
            patches=PatchPixels(setup.adapter.tower, *setup.adapter.colours())
            if any(
                need.signal == "pixels" for site in tower_sites for need in setup.method.needs(site)
            )
            else None,
        )

    def open(self) -> None:
        """Replace the tower's blocks."""
        if self.run is not None:
            self.run.__enter__()

    def close(self) -> None:
        """Restore the blocks' forward."""
        if self.run is not None:
            self.run.__exit__()

    def watch(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Store queries and keys of the running block."""
        if self.run is not None:
            self.run.watch(query, key, scaling)

    def enter(self, kwargs: Arguments, features: Tensor | None) -> Arguments:
        """Drop the tokens of the patches that were dropped inside the tower."""
        prefill = self.prefill
        all_tokens = [torch.arange(count) for count in prefill.layout.counts]
        kept = all_tokens if self.run is None else self.run.kept()
        for number in range(len(self.sites) - 1):
            prefill.kept.append(tuple(counts[number] for counts in prefill.requested))
        index = pad_sequence(kept, batch_first=True)
        index = index.repeat_interleave(prefill.beams, 0).to(prefill.stage.valid.device)
        counts = tuple(len(row_kept) for row_kept in kept for _ in range(prefill.beams))
        return gather_arguments(prefill, Decision(index, counts, ()), kwargs)

    def work(self, row: int) -> Work:
        """Return the cost that the row's images saved."""
        return NO_WORK if self.run is None else self.run.spared(row)
