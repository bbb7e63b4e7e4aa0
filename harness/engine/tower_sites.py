"""`tower` sites: blocks of the vision tower run on fewer slots, and the input of decoder layer 0 is shortened.

The modules after the tower (projector, stitching of crops, placeholders) need full grids, so the output of the last
block is put back on the grid, zero where a patch was dropped; the decoder's stage then drops the tokens of those
patches before layer 0. Patches that no token is made of (the padding of a high-resolution image) are dropped at the
first site.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from espalier.harness.cost.facts import NO_WORK, Work
from espalier.harness.cost.memory import fits_in_free_memory
from espalier.harness.engine.attention_probe import LayerHeads, rollout
from espalier.harness.engine.layout import groups, take, to_host
from espalier.harness.engine.model_parts import (
    ModelParts,
    PatchPixels,
    TowerBlock,
    replaced_forwards,
)
from espalier.harness.engine.prefill import Decision, Prefill
from espalier.harness.engine.signals.table import signal
from espalier.harness.engine.sites import Arguments, NumberedSite, Sites, gather_arguments
from espalier.harness.engine.tower_images import (
    ImageOwners,
    SlotPolicy,
    TowerImages,
    flow_after,
    image_owners,
    new_sizes,
    picture_counts,
    restore_grids,
    row_units,
)
from espalier.harness.errors import UserError
from espalier.methods.base import MethodError, Plan, Site, TokenReducer, View
from espalier.methods.chance import generators_of
from espalier.methods.select.cosines import judged_by


class TowerSites(Sites):
    """The method plans image by image inside the tower, where functions of this class replace the blocks' forward.

    Args:
        prefill: the batch.
        sites: all of the method's tower sites.

    Raises:
        MethodError: a row's tokens are blends of several patches.
    """

    def __init__(self, prefill: Prefill, sites: Sequence[NumberedSite]) -> None:
        super().__init__(prefill, sites)
        setup, layout = prefill.setup, prefill.layout
        #: Whether nothing is dropped inside the tower, so that its blocks run as they are.
        self._idle = all(
            count == visual
            for counts, visual in zip(prefill.requested, layout.counts, strict=True)
            for count in counts[: len(sites)]
        )
        if any(layout.blended) and not self._idle:
            raise MethodError(
                f"{type(setup.method).__name__} acts inside the tower and needs tokens that are its patches; this "
                "sample's are blends of several patches (pooled frames, shrunk crops)"
            )
        tower_sites = [site for _, site in sites]
        extra = int(setup.adapter.facts.class_attention == "token")
        self._policy = SlotPolicy(extra, setup.emulate, setup.method.proportional)
        self._site_at = {site.layer: number for number, site in enumerate(tower_sites)}
        self._make_planner = partial(
            TowerPlanner,
            setup.method,
            tower_sites,
            requested=prefill.requested,
            generators_of=lambda pictures, site: generators_of(
                setup.method,
                setup.seed,
                [f"{prefill.samples[row]}/{number}" for row, number in pictures],
                site,
            ),
            policy=self._policy,
        )
        self._blocks: Sequence[TowerBlock] = () if self._idle else setup.adapter.tower_blocks()
        #: Pixels of the patches, if the method reads them.
        self._patches: PatchPixels | None = None
        needs = (need for site in tower_sites for need in setup.method.needs(site))
        if not self._idle and any(need.signal == "pixels" for need in needs):
            self._patches = PatchPixels(setup.adapter.tower, *setup.adapter.colours())
        self._batch: list[TowerImages] = []
        self._owners: ImageOwners
        self._planner: TowerPlanner
        self._block_heads: LayerHeads | None = None
        self._first_unit = 0
        self._alive: list[Tensor] = []
        #: What the images of each row saved.
        self._spared = [NO_WORK] * layout.rows
        self._replaced = ExitStack()

    # ------------------------------------------------------------------ life

    def open(self) -> None:
        """Replace the blocks' forward."""
        if self._patches is not None:
            self._replaced.callback(self._patches.open().remove)
        pairs = ((block.module, partial(self._forward, n)) for n, block in enumerate(self._blocks))
        self._replaced.enter_context(replaced_forwards(pairs))

    def close(self) -> None:
        """Restore the blocks' forward."""
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
        grids, alive = restore_grids(self._batch, hidden, self._policy)
        self._alive.append(alive.flatten())
        self._first_unit += alive.numel()
        self._batch = []
        return grids

    def _start(self, hidden: Tensor) -> None:
        """Start with (P, E + N, D) patch embeddings; the row of each image is read from the layout."""
        n_pictures, n_units = hidden.shape[0], hidden.shape[1] - self._policy.extra
        self._owners = image_owners(self.prefill.layout, self._first_unit, n_pictures, n_units)
        pixels = None if self._patches is None else self._patches.pixels
        self._planner = self._make_planner(owners=self._owners, pixels=pixels)
        n_slots, blocks = hidden.shape[1], len(self._blocks)
        for row in self._owners.rows:
            self._spare(row, blocks * n_slots, blocks * n_slots, blocks * n_slots**2)
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
                with self.prefill.clock.phase("select"):
                    pictures.flow = flow_after(pictures, block.values(entering), self._policy)
        groups = self._reduce(number, pictures) if number in self._site_at else [pictures]
        for group in groups:
            self._count(group, attended=False)
            group.hidden = block.transform(group.hidden)
        return groups

    def _reduce(self, block: int, pictures: TowerImages) -> list[TowerImages]:
        setup = self.prefill.setup
        with self.prefill.clock.phase("select"), setup.conditions.collecting():
            return self._planner.reduce(self._site_at[block], pictures)

    # ------------------------------------------------------------------ results

    def enter(self, kwargs: Arguments, features: Tensor | None) -> Arguments:
        """Drop the tokens of the patches that were dropped inside the tower."""
        prefill = self.prefill
        kept = self._kept()
        for number in range(len(self.sites) - 1):
            prefill.kept.append(tuple(counts[number] for counts in prefill.requested))
        index = pad_sequence(kept, batch_first=True).repeat_interleave(prefill.beams, 0)
        counts = tuple(len(row_kept) for row_kept in kept for _ in range(prefill.beams))
        return gather_arguments(
            prefill, Decision(index.to(prefill.stage.valid.device), counts, ()), kwargs
        )

    def _kept(self) -> list[Tensor]:
        """Return for each row the indices of the visual tokens that are alive, ascending."""
        layout = self.prefill.layout
        if self._idle:
            return [torch.arange(count) for count in layout.counts]
        units = [row_units(layout, row) for row in range(layout.rows)]
        alive, *units = to_host(torch.cat(self._alive), *units)
        return [alive[row_indices].nonzero()[:, 0] for row_indices in units]

    def _count(self, pictures: TowerImages, attended: bool) -> None:
        """Count for each row the slots that a half of a block runs on."""
        n_slots = pictures.origin.shape[1] + self._policy.extra
        ran = (-n_slots, 0, -(n_slots**2)) if attended else (0, -n_slots, 0)
        for member in pictures.members:
            self._spare(self._owners.rows[member], *ran)

    def _spare(self, row: int, attention: int, mlp: int, pairs: int) -> None:
        spared = Work(spared_attention=attention, spared_mlp=mlp, spared_pairs=pairs)
        self._spared[row] = self._spared[row].plus(spared)

    def work(self, row: int) -> Work:
        """Return the cost that the row's images saved."""
        return self._spared[row]


#: Signals made of the queries and keys of tower blocks.
HEADS = frozenset({"block_keys", "rollout", "flow"})


def watched_blocks(
    adapter: ModelParts, method: TokenReducer, sites: Sequence[Site]
) -> Sequence[TowerBlock]:
    """Return the blocks with queries and keys that a method reads at its sites inside the tower.

    Raises:
        UserError: the model has no such blocks, or its kernel takes no bias for sizes.
    """
    blocks = adapter.tower_blocks()
    kernel = str(blocks[0].attention.config._attn_implementation)
    if method.proportional and kernel.startswith("flash"):
        raise UserError(
            f"model.attention={kernel!r} takes no bias for sizes (proportional attention); valid: sdpa"
        )
    read = {need.signal for site in sites for need in method.needs(site)}
    return blocks[: sites[-1].layer + 1] if read & HEADS else []


@signal(
    "sizes",
    "(P, N) how many patches each slot of a picture stands for, fp32; at `tower` sites",
    inside_tower=True,
)
@signal(
    "sequence",
    "(P, E + N) slots of a picture in the order of the last site's `Plan.order`, at the first site of "
    "the raster; a class token (E = 1) stands in front, as -1; at `tower` sites",
    inside_tower=True,
)
@signal(
    "flow",
    "(P, N) information flow of the tower's blocks so far, half the last one's and half what was "
    "before: the class token's attention and the likeness of its value, or the attention received, "
    "times the value's size; fp32; at `tower` sites",
    inside_tower=True,
)
@signal(
    "pixels",
    "(P, N, F) pixels in [0, 1] of each patch, as the tower sees them; fp32 or wider; at `tower` "
    "sites",
    inside_tower=True,
)
@signal(
    "block_keys",
    "(P, N, Dk) keys of the site's tower block, mean over heads; at `tower` sites",
    inside_tower=True,
)
@signal(
    "rollout",
    "(P, N) attention rollout, as in `text_rollout`, of the tower blocks since the last site: the "
    "class token's row, or the mean over rows where the tower has none, fp32; at `tower` sites",
    inside_tower=True,
)
class TowerPlanner:
    """Gets and applies plans for the images of one tower call.

    Args:
        method: the reducer.
        sites: its tower sites, first to last.
        owners: batch rows of the images.
        requested: tokens to keep after each tower site, for each row.
        generators_of: called with (row, image of the row) of some images and the number of the site for generators.
        policy: how slots are kept.
        pixels: (P, N, F) in [0, 1] of the images' patches; None: the method does not read them.
    """

    def __init__(
        self,
        method: TokenReducer,
        sites: Sequence[Site],
        owners: ImageOwners,
        requested: Sequence[Sequence[int]],
        generators_of: Callable[[Sequence[tuple[int, int]], int], Sequence[torch.Generator]],
        policy: SlotPolicy,
        pixels: Tensor | None = None,
    ) -> None:
        self._pixels = pixels
        self._method = method
        self._sites = sites
        self._owners = owners
        self._generators_of = generators_of
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
        index = _index(members, device)
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
        index = _index(members, indices.device)
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
            generators=self._generators(images.members, site),
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

    def _generators(self, members: Sequence[int], site: int) -> Sequence[torch.Generator]:
        rows = self._owners.rows
        return self._generators_of(
            [(rows[picture], rows[:picture].count(rows[picture])) for picture in members], site
        )

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
        dtype = torch.promote_types(query.dtype, torch.float32)
        start = torch.zeros(len(query), 1, n_slots, dtype=dtype, device=query.device)
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
        return rollout(pictures.heads, start, lambda *_: alive[:, None, None])[:, 0, extra:]


def _index(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return numbers (n,) on a device: made there if they follow one another, as they do in most batches."""
    first, last = numbers[0], numbers[-1]
    if list(numbers) == list(range(first, last + 1)):
        return torch.arange(first, last + 1, device=device)
    return torch.tensor(numbers, device=device)
