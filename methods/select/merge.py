"""Bookkeeping of merging: how many tokens share a slot, where each goes, and merging in turn."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from espalier.methods.checks import require_finite
from espalier.methods.plans import Assignment
from espalier.methods.select.similarity import unit
from espalier.methods.select.topk import rows_of


def slot_sizes(slot: Tensor) -> Tensor:
    """Return (B, N) how many tokens share each token's slot (B, N), in fp32; 0 where the slot is -1. Cost: O(N)."""
    inside = (slot >= 0).float()
    at = slot.clamp(min=0)
    return inside * torch.zeros_like(inside).scatter_add(1, at, inside).gather(1, at)


def nearest_kept(states: Tensor, kept: Tensor) -> Tensor:
    """Return (B, N) the slot among `kept` (B, K) that each token goes to: a kept one to its own, others by cosine.

    Of equal cosines the lower index wins. Cost: O(N K D).

    Raises:
        MethodError: a cosine is NaN.
    """
    units = normalize(states.float() if states.element_size() < 4 else states, dim=-1)
    cosine = require_finite(units @ units[rows_of(kept), kept].transpose(1, 2), "cosine of states")
    slot = cosine.argmax(dim=2)
    own_slots = torch.arange(kept.shape[1], dtype=slot.dtype, device=slot.device).expand_as(kept)
    return slot.scatter(1, kept, own_slots)


def halved_into(tokens: Tensor, kept: Tensor) -> Assignment:
    """Return the merging of each other token (B, N, D) in turn into the kept one most like it, half and half."""
    units = unit(tokens)
    nearest = (units @ units[rows_of(kept), kept].transpose(1, 2)).argmax(dim=2)
    stays = torch.zeros_like(nearest, dtype=torch.bool).scatter(1, kept, True)
    slot = torch.where(stays, stays.cumsum(dim=1) - 1, nearest)
    group = torch.where(stays, kept.shape[1], slot)
    order = group.argsort(dim=1, stable=True)
    sizes = torch.zeros_like(kept[:, :1]).expand(-1, kept.shape[1] + 1)
    sizes = sizes.scatter_add(1, group, torch.ones_like(group))
    place = torch.arange(group.shape[1], device=group.device).expand_as(group)
    ranked = place - (sizes.cumsum(dim=1) - sizes).gather(1, group.gather(1, order))
    rank = torch.zeros_like(group).scatter(1, order, ranked)
    later = sizes.gather(1, slot) - torch.where(stays, 0, rank)
    return Assignment(slot, 0.5 ** later.float())
