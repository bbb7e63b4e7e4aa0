"""Information flow to each patch, block by block of the tower: the signal `flow` of FlowCut (arXiv 2505.19536)."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.harness.engine.attention_probe import attention_rows, received_unmasked
from espalier.harness.engine.tower.tower_images import SlotPolicy, TowerImages


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
