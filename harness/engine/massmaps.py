"""What some queries pay each key, largest over heads: summed up block by block, the maps themselves are never held."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.engine.layout import Layout, Stage
from harness.engine.probe import head_rows

#: Signals made here: who asks, the words behind the image or the visual tokens that are left.
MASSES = ("text_received_max", "visual_received_max")


def words_behind(layout: Layout) -> Tensor:
    """Return (B, T): which words stand behind the last visual token of their row, dropped since or not."""
    last = pad(layout.visual, (1, 0), value=-1).amax(
        dim=1, keepdim=True
    )  # a batch may be of words alone
    return layout.words > last


def asking(signal: str, stage: Stage, behind: Tensor) -> Tensor:
    """Return the (B, R) slots of the queries of a signal, -1 where a row has fewer. `behind` is `words_behind`."""
    if signal == "text_received_max":
        return torch.where(behind.to(stage.words.device), stage.words, -1)
    counts = torch.tensor(stage.counts, device=stage.slots.device).unsqueeze(1)
    place = torch.arange(stage.slots.shape[1], device=stage.slots.device)
    return torch.where(place < counts, stage.slots, -1)


def received_max(
    query: Tensor, key: Tensor, scaling: float, valid: Tensor, slots: Tensor, block: int = 256
) -> Tensor:
    """Return (B, S): the largest attention over heads that each key receives, mean over the asked queries (causal).

    Args:
        query: (B, H, S, Dh) rotary positions applied.
        key: (B, H_kv, S, Dh).
        scaling: factor of the logits.
        valid: (B, S) which slots may be attended to.
        slots: (B, R) slots of the asked queries, -1 where a row has fewer; a row without any receives 0.
        block: queries at a time.

    Cost: O(H R S Dh); memory O(H block S). FitPrune (arXiv 2409.10197).
    """
    slot = torch.arange(key.shape[2], device=key.device)
    rows = torch.arange(slots.shape[0], device=key.device).unsqueeze(1)
    accumulator = torch.promote_types(query.dtype, torch.float32)
    total = torch.zeros(valid.shape, dtype=accumulator, device=key.device)
    for some in slots.split(block, dim=1):
        asked = query.transpose(1, 2)[rows, some.clamp(min=0)].transpose(1, 2)
        visible = (slot <= some.unsqueeze(2)) & valid.unsqueeze(1)
        weights = head_rows(asked, key, scaling, visible.unsqueeze(1)).amax(dim=1)
        total += (weights * (some >= 0).unsqueeze(2)).sum(dim=1)
    return total / (slots >= 0).sum(dim=1, keepdim=True).clamp(min=1)
