"""PageRank of a decoder layer's attention: `page_rank`. Captured in the prefill, in the layer before the site."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.harness.engine.attention_probe import head_rows
from espalier.harness.engine.layout import Stage
from espalier.harness.engine.signals.producer import DecoderSignal, ViewRequest
from espalier.harness.engine.visibility import CAUSAL, Visibility

#: Of AIM (arXiv 2412.03248).
TEMPERATURE, ROUNDS = 0.1, 5


class PageRank(DecoderSignal):
    """The rank of each visual token among all tokens left."""

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Compute the ranks of all slots."""
        visibility = self.context.visibility
        return self.per_token(stage, page_rank(query, key, scaling, stage.valid, visibility))

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n)."""
        return request.select(self.captured)


def page_rank(
    query: Tensor,
    key: Tensor,
    scaling: float,
    valid: Tensor,
    visibility: Visibility = CAUSAL,
    block: int = 256,
) -> Tensor:
    """Return (B, S): each slot's rank after `ROUNDS` rounds in which it goes where the slot attends to.

    Args:
        query: (B, H, S, Dh) rotary positions applied.
        key: (B, H_kv, S, Dh).
        scaling: factor of the logits, before the temperature.
        valid: (B, S) slots that may be attended to; others have rank 0.
        visibility: attention visibility.
        block: queries at a time; the map is computed anew in every round and never stored.

    Cost: ROUNDS times O(H S^2 Dh); memory O(H block S).
    """
    n_slots, accumulator = key.shape[2], torch.promote_types(query.dtype, torch.float32)
    slot = torch.arange(n_slots, device=key.device)
    equal = valid.to(accumulator) / valid.sum(dim=1, keepdim=True).clamp(min=1)
    rank = equal.unsqueeze(1).expand(-1, query.shape[1], -1)
    for _ in range(ROUNDS):
        following = torch.zeros_like(rank)
        for start in range(0, n_slots, block):
            part = slice(start, start + block)
            visible = visibility.sees(slot[part], n_slots) & valid.unsqueeze(1)
            rows = head_rows(query[:, :, part], key, scaling / TEMPERATURE, visible.unsqueeze(1))
            following += (rank[:, :, part].unsqueeze(2) @ rows).squeeze(2)
        rank = following
    return rank.square().mean(dim=1).sqrt()
