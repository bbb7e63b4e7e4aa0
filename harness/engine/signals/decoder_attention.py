"""Attention of decoder layers in the prefill: what each visual token receives, the words' rows, PageRank, rollout.

Captured in the layer before the site, `text_rollout` in the layers since the last site. Sums over queries are made
block by block: full maps are never stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from espalier.harness.engine.attention_probe import (
    LayerHeads,
    Watcher,
    head_rows,
    last_row,
    query_rows,
    received_mean,
    rollout,
    word_rows,
)
from espalier.harness.engine.layout import CAUSAL, Layout, Stage, Visibility, fill_padding
from espalier.harness.engine.signals.producer import DecoderSignal, ViewRequest
from espalier.harness.engine.signals.table import signal
from espalier.methods.base import Need, Site


@signal(
    "last_attention",
    "(B, N) attention that the last prompt token pays each visual token, mean over heads, fp32",
)
class LastAttention(DecoderSignal):
    """Attention from the prompt's last token, which in a denoising step precedes the answer."""

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Compute one row."""
        prompt = query[:, :, : query.shape[2] - self._answer_length]
        visible = self.context.visible_to_last(stage, self.layer)
        return self.per_token(stage, last_row(prompt, key, scaling, visible))


@signal(
    "mean_attention",
    "(B, N) attention a visual token receives, mean over all queries that can see it and heads, fp32",
)
class MeanAttention(DecoderSignal):
    """Mean attention from all queries that see the token."""

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Compute all rows, block by block."""
        visibility = self.context.visibility(stage, self.layer)
        received = received_mean(query, key, scaling, stage.valid, visibility=visibility)
        return self.per_token(stage, received)


@signal(
    "text_attention",
    "(B, T, N) attention that each word pays each visual token, mean over heads, fp32, 0 where a row "
    "has fewer words",
)
class TextAttention(DecoderSignal):
    """Attention rows of all words, mean over heads."""

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Compute the words' rows."""
        visibility = self.context.visibility(stage, self.layer)
        rows = word_rows(query, key, scaling, stage.valid, stage.words, visibility=visibility)
        return self.per_token(stage, rows.transpose(1, 2))

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, T, n)."""
        return request.select(self.captured).transpose(1, 2)


@signal(
    "visual_received_max",
    "(B, N) attention a visual token receives, largest over heads, mean over the visual tokens left, "
    "fp32",
)
class VisualReceivedMax(DecoderSignal):
    """Attention from the remaining visual tokens."""

    def query_slots(self, stage: Stage) -> Tensor:
        """Return the (B, R) slots of the queries, -1 where a row has fewer."""
        return fill_padding(stage.slots, stage.counts, -1)

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Compute the rows of these queries."""
        slots, visibility = self.query_slots(stage), self.context.visibility(stage, self.layer)
        # The largest over queries counts, or their mean.
        peak = self.need.signal == "text_received_peak"
        received = received_max(
            query, key, scaling, stage.valid, slots, visibility=visibility, peak=peak
        )
        return self.per_token(stage, received)


@signal(
    "text_received_max",
    "(B, N) attention a visual token receives, largest over heads, mean over the words after the "
    "image, fp32",
)
@signal(
    "text_received_peak",
    "(B, N) attention a visual token receives, largest over heads and over the words after the image, "
    "fp32",
)
class TextReceivedMax(VisualReceivedMax):
    """Attention from the words after the image."""

    _after_image: Tensor

    def enter(self, layout: Layout, hidden: Tensor) -> None:
        """Find these words while no visual token has been dropped."""
        super().enter(layout, hidden)
        self._after_image = words_after_image(layout)

    def query_slots(self, stage: Stage) -> Tensor:
        """Return the (B, R) slots of the queries, -1 where a row has fewer."""
        return torch.where(self._after_image.to(stage.words.device), stage.words, -1)


@signal(
    "text_information",
    "(B, 1) mutual information in bits of the words after the image and the visual tokens, by the "
    "words' attention, all words alike, sum over heads, fp32",
)
class TextInformation(TextReceivedMax):
    """Mutual information of the words after the image and the remaining visual tokens."""

    by_row = True

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Compute (B, 1) bits."""
        words, visibility = self.query_slots(stage), self.context.visibility(stage, self.layer)
        tokens, visual = VisualReceivedMax.query_slots(self, stage), pad(stage.valid, (0, 1))
        # A slot of -1 goes to the extra column, which is cut off.
        visual = torch.zeros_like(visual).scatter(1, tokens % visual.shape[1], True)[:, :-1]
        return mutual_information(query, key, scaling, stage.valid, words, visual, visibility)


#: Added to the product of the two shares, in AutoPrune (arXiv 2509.23931).
EPSILON = 1e-6


def mutual_information(
    query: Tensor,
    key: Tensor,
    scaling: float,
    valid: Tensor,
    slots: Tensor,
    visual: Tensor,
    visibility: Visibility = CAUSAL,
    block: int = 256,
) -> Tensor:
    """Return (B, 1): mutual information in bits of the queries in `slots` and the `visual` (B, S) keys, sum over heads.

    All queries count alike, and their weights are not normalised over these keys; a row without queries has 0. Other
    arguments and cost are those of `query_rows`. Source: AutoPrune (arXiv 2509.23931), its released code.
    """
    accumulator = torch.promote_types(query.dtype, torch.float32)
    n_queries = (slots >= 0).sum(dim=1).clamp(min=1)[:, None, None]
    total = torch.zeros(*query.shape[:2], key.shape[2], dtype=accumulator, device=key.device)
    received = total.clone()
    for weights, real in query_rows(query, key, scaling, valid, slots, block, visibility):
        joint = weights * (real & visual.unsqueeze(1)).unsqueeze(1) / n_queries.unsqueeze(3)
        total += torch.xlogy(joint, joint * n_queries.unsqueeze(3)).sum(dim=2)
        received += joint.sum(dim=2)
    total -= received * torch.log(received + n_queries * EPSILON)
    return total.sum(dim=(1, 2)).unsqueeze(1) / math.log(2)


def words_after_image(layout: Layout) -> Tensor:
    """Return (B, T): True for words after the last visual token of their row, dropped or not."""
    # A batch may have no visual tokens.
    last = pad(layout.visual, (1, 0), value=-1).amax(dim=1, keepdim=True)
    return layout.words > last


def received_max(
    query: Tensor,
    key: Tensor,
    scaling: float,
    valid: Tensor,
    slots: Tensor,
    block: int = 256,
    visibility: Visibility = CAUSAL,
    peak: bool = False,
) -> Tensor:
    """Return (B, S): the largest attention over heads that each key receives, mean over the given queries or `peak`.

    Arguments and cost are those of `query_rows`; a row without queries receives 0. FitPrune (arXiv 2409.10197).
    """
    accumulator = torch.promote_types(query.dtype, torch.float32)
    total = torch.zeros(valid.shape, dtype=accumulator, device=key.device)
    for weights, real in query_rows(query, key, scaling, valid, slots, block, visibility):
        largest = weights.amax(dim=1) * real
        total = torch.maximum(total, largest.amax(dim=1)) if peak else total + largest.sum(dim=1)
    return total if peak else total / (slots >= 0).sum(dim=1, keepdim=True).clamp(min=1)


#: Of AIM (arXiv 2412.03248).
TEMPERATURE, ROUNDS = 0.1, 5


@signal(
    "page_rank",
    "(B, N) PageRank of the layer's attention at a tenth of the temperature, five rounds from equal "
    "ranks of all tokens left, root of the mean square over heads, fp32",
)
class PageRank(DecoderSignal):
    """The rank of each visual token among all tokens left."""

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Compute the ranks of all slots."""
        visibility = self.context.visibility(stage, self.layer)
        return self.per_token(stage, page_rank(query, key, scaling, stage.valid, visibility))


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


@signal(
    "text_rollout",
    "(B, T, N) attention rollout, the product of 0.5 A + 0.5 I with A the mean over heads, of the "
    "decoder layers since the last site: one row for each word, fp32, 0 where a row has fewer",
)
class TextRollout(TextAttention):
    """Keeps queries and keys of the layers in between, and computes the rollout after the last of them."""

    @classmethod
    def attended(cls, need: Need, site: Site, sites: Sequence[Site]) -> Sequence[int]:
        """Return the layers since the last site that takes effect between layers."""
        starts = (earlier.shortens or 0 for earlier in sites)
        earlier = [start for start in starts if start < site.layer]
        return range(max(earlier, default=0), site.layer)

    def watchers(self) -> Sequence[tuple[nn.Module, Watcher]]:
        """Return the attention of these layers."""
        self._window = self.attended(self.need, self.site, self.context.sites)
        self._heads: list[LayerHeads] = []
        attention = self.context.parts.decoder_attention
        return [(attention(index), partial(self._add, index)) for index in self._window]

    def _add(self, index: int, query: Tensor, key: Tensor, scaling: float) -> None:
        stage = self.context.stage()
        if stage is None:
            return
        stage.move(query.device)
        if index == self._window[0]:
            self._heads.clear()
        self._heads.append((query, key, scaling))
        if index == self._window[-1]:
            visibilities = [self.context.visibility(stage, layer) for layer in self._window]
            rows = rollout_of_words(self._heads, stage.valid, stage.words, visibilities)
            self._captured = self.per_token(stage, rows.transpose(1, 2))
            self._heads.clear()


def rollout_of_words(
    layers: Sequence[LayerHeads],
    valid: Tensor,
    words: Tensor,
    visibilities: Sequence[Visibility],
) -> Tensor:
    """Return (B, T, S): the rollout of decoder layers from each word's slot (B, T), 0 where the slot is -1.

    Args:
        layers: of the decoder, first to last, all with the same slots.
        valid: (B, S) slots that may be attended to.
        words: (B, T) slots.
        visibilities: attention visibility of each layer.
    """
    query = layers[0][0]
    slot = torch.arange(query.shape[2], device=query.device)
    start = (words.unsqueeze(2) == slot).to(torch.promote_types(query.dtype, torch.float32))

    def visible(number: int, block_slots: slice) -> Tensor:
        sees = visibilities[number].sees(slot[block_slots], len(slot))
        return (sees & valid.unsqueeze(1))[:, None]

    return rollout(layers, start, visible)
