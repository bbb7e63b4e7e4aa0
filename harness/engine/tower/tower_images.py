"""Pictures on their way through the tower, and what is done to their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.harness.engine.layout import take
from espalier.harness.engine.rollout import Heads
from espalier.methods.base import Assignment, Plan


@dataclass(frozen=True)
class Towering:
    """How slots are kept.

    Attributes:
        extra: 1 if slot 0 is a class token.
        emulate: keep all slots and mask what is gone, the slow reference.
        weighed: whether keys count by the size of their slot.
    """

    extra: int
    emulate: bool
    weighed: bool


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

    @classmethod
    def whole(cls, hidden: Tensor, extra: int) -> Pictures:
        """Every patch of (P, E + N, D) alive, each for itself."""
        n_pictures, n_units = hidden.shape[0], hidden.shape[1] - extra
        origin = torch.arange(n_units, device=hidden.device).expand(n_pictures, -1)
        sizes = torch.ones(n_pictures, n_units, device=hidden.device)
        return cls(list(range(n_pictures)), hidden, origin, sizes, origin, [])

    def slots(self, emulate: bool) -> Tensor:
        """Return (P, n) where the slots alive stand behind the class token."""
        if emulate:
            return self.origin
        own = torch.arange(self.origin.shape[1], device=self.origin.device)
        return own.expand_as(self.origin)

    def bias(self, how: Towering) -> Tensor | None:
        """Return what is added to the logits: log-sizes if keys count by them, -inf where emulation hides."""
        if not how.weighed and not how.emulate:
            return None
        bias = self.hidden.new_zeros(self.hidden.shape[:2])
        logs = self.sizes.log() if how.weighed else torch.zeros_like(self.sizes)
        if how.emulate:
            bias[:, how.extra :] = -torch.inf
        bias[:, how.extra :].scatter_(1, self.slots(how.emulate), logs.to(bias.dtype))
        return bias[:, None, None]


def put_back(found: Sequence[Pictures], like: Tensor, how: Towering) -> tuple[Tensor, Tensor]:
    """Put slots back on the grids (P, E + N, D) of `like`, zero where a patch is gone.

    Returns:
        whole: (P, E + N, D).
        alive: (P, N) which patches are.
    """
    extra = how.extra
    n_units = like.shape[1] - extra
    whole = torch.zeros_like(like)
    alive = torch.zeros(like.shape[0], n_units, dtype=torch.bool, device=like.device)
    for pictures in found:
        place = torch.tensor(pictures.members, device=like.device)
        values = take(pictures.hidden[:, extra:], pictures.slots(how.emulate), -2)
        grid = values.new_zeros(len(place), n_units, values.shape[2])
        grid.scatter_(1, pictures.origin.unsqueeze(-1).expand_as(values), values)
        whole[place] = torch.cat([pictures.hidden[:, :extra], grid], dim=1)
        alive[place] = alive[place].scatter(
            1, pictures.origin, torch.ones_like(pictures.origin, dtype=torch.bool)
        )
    return whole, alive


def new_sizes(plan: Plan, sizes: Tensor) -> Tensor:
    """Return (P, K): how many patches the kept slots stand for, out of (P, N)."""
    if plan.merge is None:
        return take(sizes, plan.kept, -1)
    if isinstance(plan.merge, Assignment):
        whole = Assignment(plan.merge.slot, torch.ones_like(sizes))
        return whole.apply(sizes.unsqueeze(-1), plan.kept.shape[1]).squeeze(-1)
    return plan.merge.apply(sizes.unsqueeze(-1), plan.kept.shape[1]).squeeze(-1)
