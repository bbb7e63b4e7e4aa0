"""Images on their way through the tower, and operations on their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.harness.engine.layout import take
from espalier.harness.engine.rollout import LayerHeads
from espalier.methods.base import Assignment, Plan


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
    """

    members: list[int]
    hidden: Tensor
    origin: Tensor
    sizes: Tensor
    order: Tensor
    heads: list[LayerHeads]

    @classmethod
    def all_alive(cls, hidden: Tensor, extra: int) -> TowerImages:
        """Return images (P, E + N, D) with every patch alive, each in its own slot."""
        n_pictures, n_units = hidden.shape[0], hidden.shape[1] - extra
        origin = torch.arange(n_units, device=hidden.device).expand(n_pictures, -1)
        sizes = torch.ones(n_pictures, n_units, device=hidden.device)
        return cls(list(range(n_pictures)), hidden, origin, sizes, origin, [])

    def slots(self, emulate: bool) -> Tensor:
        """Return (P, n) positions of the alive slots after the class token."""
        if emulate:
            return self.origin
        indices = torch.arange(self.origin.shape[1], device=self.origin.device)
        return indices.expand_as(self.origin)

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
    if isinstance(plan.merge, Assignment):
        summed = Assignment(plan.merge.slot, torch.ones_like(sizes))
        return summed.apply(sizes.unsqueeze(-1), plan.kept.shape[1]).squeeze(-1)
    return plan.merge.apply(sizes.unsqueeze(-1), plan.kept.shape[1]).squeeze(-1)
