"""Images on their way through the tower: the rows that own them, operations on their slots, and their flow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.harness.engine.attention_probe import LayerHeads, attention_rows, received_unmasked
from espalier.harness.engine.layout import Layout, moved, take
from espalier.methods.base import Assignment, MethodError, Plan


@dataclass(frozen=True, eq=False)
class ImageOwners:
    """Batch rows of the images of one tower call.

    Attributes:
        rows: batch row of each image.
        counts: number of patches of each image that tokens are made of.
        lives: (P, N) mask of these patches.
    """

    rows: list[int]
    counts: list[int]
    lives: Tensor


def image_owners(layout: Layout, first: int, n_pictures: int, n_units: int) -> ImageOwners:
    """Return the owners of one call's `n_pictures` images, read from a layout.

    Args:
        layout: of the batch.
        first: number of the call's first unit in the batch.
        n_pictures: images of the call.
        n_units: projector units of each image.

    Raises:
        MethodError: a row has images in this call and in another.
    """
    rows = [0] * n_pictures
    lives = torch.zeros(n_pictures * n_units, dtype=torch.bool)
    for row in range(layout.rows):
        units = row_units(layout, row).cpu() - first
        inside = (units >= 0) & (units < len(lives))
        if not inside.all() and inside.any():
            raise MethodError(
                "tower sites need all images of a sample in one call of the tower; this model makes several"
            )
        units = units[inside]
        lives[units] = True
        for picture in (units // n_units).unique().tolist():
            rows[picture] = row
    table = lives.view(n_pictures, n_units)
    counts: list[int] = table.sum(1).tolist()
    return ImageOwners(rows, counts, table)


def row_units(layout: Layout, row: int) -> Tensor:
    """Return (n,) the projector unit of each visual token of a row with tokens that are single units."""
    source = layout.source[row, : layout.counts[row]]
    if layout.share is None:
        return source[:, 0]
    return source.gather(1, layout.share[row, : layout.counts[row]].argmax(1, keepdim=True))[:, 0]


def picture_counts(
    counts: Sequence[int], rows: Sequence[int], keep: Sequence[int]
) -> dict[int, int]:
    """Split each row's `keep` over its images, in proportion to their patches."""
    counts_kept: dict[int, int] = {}
    for row in sorted(set(rows)):
        members = [picture for picture, owner in enumerate(rows) if owner == row]
        shares = share_out([counts[picture] for picture in members], keep[row])
        counts_kept.update(zip(members, shares, strict=True))
    return counts_kept


def share_out(sizes: Sequence[int], total: int) -> list[int]:
    """Split `total` in proportion to `sizes`, with no share above its size (Webster's rule; ties go to the first).

    A divisor rule never gives less if `total` grows, so a schedule that falls from site to site falls in every image.
    Cost: O(N log N).
    """
    size = torch.tensor(sizes)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), size)
    rank = torch.arange(int(size.sum())) - torch.repeat_interleave(size.cumsum(0) - size, size)
    quotient = size[owner].double() / (2 * rank + 1)
    winners = quotient.argsort(descending=True, stable=True)[:total]
    return torch.bincount(owner[winners], minlength=len(sizes)).tolist()


@dataclass(frozen=True)
class SlotPolicy:
    """How slots are kept.

    Attributes:
        extra: 1 if slot 0 is a class token.
        emulate: keep all slots and mask dropped ones, the slow reference.
        weighed: whether keys are weighted by the size of their slot.
    """

    extra: int
    emulate: bool
    weighed: bool


@dataclass(eq=False)
class TowerImages:
    """Images with the same number of slots, on their way through the blocks.

    Attributes:
        members: their numbers in the batch.
        hidden: (P, E + n, D) residual stream, E = 1 if the tower has a class token; emulated: all N slots.
        origin: (P, n) patch of each slot, ascending.
        sizes: (P, n) number of patches that each slot represents.
        order: (P, n) slots in the order of the method's last plan.
        heads: queries and keys of the blocks since the last site.
        flow: (P, n) information flow of each slot, where a method reads it.
    """

    members: list[int]
    hidden: Tensor
    origin: Tensor
    sizes: Tensor
    order: Tensor
    heads: list[LayerHeads]
    flow: Tensor | None = None

    @classmethod
    def all_alive(cls, hidden: Tensor, extra: int) -> TowerImages:
        """Return images (P, E + N, D) with every patch alive, each in its own slot."""
        n_pictures, n_units = hidden.shape[0], hidden.shape[1] - extra
        origin = torch.arange(n_units, device=hidden.device).expand(n_pictures, -1)
        sizes = torch.ones(n_pictures, n_units, device=hidden.device)
        return cls(list(range(n_pictures)), hidden, origin, sizes, origin, [])

    def move(self, device: torch.device) -> TowerImages:
        """Move the images to `device`, the device of the block that runs next: a tower may be spread over several."""
        if self.hidden.device != device:
            for name, value in moved(self, device).items():
                setattr(self, name, value)
            self.heads = [(q.to(device), k.to(device), scaling) for q, k, scaling in self.heads]
        return self

    def slots(self, emulate: bool) -> Tensor:
        """Return (P, n) positions of the alive slots after the class token."""
        if emulate:
            return self.origin
        return torch.arange(self.origin.shape[1], device=self.origin.device).expand_as(self.origin)

    def bias(self, policy: SlotPolicy) -> Tensor | None:
        """Return the bias added to the logits: log-sizes if keys are weighted, -inf where emulation hides."""
        if not policy.weighed and not policy.emulate:
            return None
        bias = self.hidden.new_zeros(self.hidden.shape[:2])
        logs = self.sizes.log() if policy.weighed else torch.zeros_like(self.sizes)
        if policy.emulate:
            bias[:, policy.extra :] = -torch.inf
        bias[:, policy.extra :].scatter_(1, self.slots(policy.emulate), logs.to(bias.dtype))
        return bias[:, None, None]


def restore_grids(
    groups: Sequence[TowerImages], like: Tensor, policy: SlotPolicy
) -> tuple[Tensor, Tensor]:
    """Put slots back on the grids (P, E + N, D) of `like`, zero where a patch was dropped.

    Returns:
        grids: (P, E + N, D).
        alive: (P, N) mask of the patches alive.
    """
    extra = policy.extra
    n_units = like.shape[1] - extra
    grids = torch.zeros_like(like)
    alive = torch.zeros(like.shape[0], n_units, dtype=torch.bool, device=like.device)
    for pictures in groups:
        members = torch.tensor(pictures.members, device=like.device)
        values = take(pictures.hidden[:, extra:], pictures.slots(policy.emulate), -2)
        grid = values.new_zeros(len(members), n_units, values.shape[2])
        grid.scatter_(1, pictures.origin.unsqueeze(-1).expand_as(values), values)
        grids[members] = torch.cat([pictures.hidden[:, :extra], grid], dim=1)
        alive[members] = alive[members].scatter(
            1, pictures.origin, torch.ones_like(pictures.origin, dtype=torch.bool)
        )
    return grids, alive


def new_sizes(plan: Plan, sizes: Tensor) -> Tensor:
    """Return (P, K): number of patches that each kept slot represents, from (P, N)."""
    if plan.merge is None:
        return take(sizes, plan.kept, -1)
    merge = plan.merge
    if isinstance(merge, Assignment):
        merge = Assignment(merge.slot, torch.ones_like(sizes))
    return merge.apply(sizes.unsqueeze(-1), plan.kept.shape[1]).squeeze(-1)


def flow_after(pictures: TowerImages, values: Tensor, policy: SlotPolicy) -> Tensor:
    """Return (P, n) the flow of the slots alive after a block: half its own, half what was before.

    Args:
        pictures: with the block's queries and keys as the last of `heads`.
        values: (P, H, S, Dh) of the block.
        policy: how slots are kept.
    """
    query, key, scaling = pictures.heads[-1]
    slots, extra = pictures.slots(policy.emulate) + policy.extra, policy.extra
    index = torch.cat([slots.new_zeros(len(slots), extra), slots], dim=1)[:, None, :, None]
    query, key, values = (
        states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))
        for states in (query, key, values)
    )
    flow = block_flow(query, key, values, scaling, extra)
    return flow if pictures.flow is None else 0.5 * pictures.flow + 0.5 * flow


def block_flow(query: Tensor, key: Tensor, value: Tensor, scaling: float, extra: int) -> Tensor:
    """Return (P, n) the flow of one block, in fp32.

    With a class token, its attention to each patch plus the same with values for queries and keys and without scaling,
    each mean over heads and divided by its sum over patches; without one, the attention received. Either is multiplied
    by the sum of absolute entries of the patch's value, mean over heads.

    Args:
        query: (P, H, E + n, Dh) of the slots alive.
        key: (P, H, E + n, Dh).
        value: (P, H, E + n, Dh).
        scaling: factor of the logits of the attention.
        extra: 1 if slot 0 is a class token, E.
    """
    size = value.float().mean(dim=1).abs().sum(dim=2)[:, extra:]
    if not extra:
        return received_unmasked(query, key, scaling) * size
    rows = (
        attention_rows(query[:, :, :1], key, scaling, None)[:, 0, 1:],
        attention_rows(value[:, :, :1], value, 1.0, None)[:, 0, 1:],
    )
    relation, semantic = (row / row.sum(dim=1, keepdim=True) for row in rows)
    return (relation + semantic) * size
