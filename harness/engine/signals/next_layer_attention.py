"""Attention and keys of a decoder layer that has not run yet: the signals named `next_...`.

Captured when the site is reached: queries and keys of the site's layer, for the states that are about to enter it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from espalier.harness.engine.attention_probe import Watcher, last_row
from espalier.harness.engine.layout import Stage
from espalier.harness.engine.signals.producer import DecoderSignal, ViewRequest
from espalier.harness.engine.signals.table import signal
from espalier.methods.base import Need, Site

#: Makes a row of a layer's queries and keys.
Taken = Callable[[Tensor, Tensor, float, Tensor], Tensor]


class NextRow:
    """Runs a layer's forward up to its attention and no further: no kernel, no MLP, nothing cached.

    So norm, projections and rotary positions are the layer's, in every family. The watcher ends the forward by an
    exception once it has queries and keys; the layer's later run is not affected.

    Args:
        layer: the decoder layer; `watch` must be among the watchers of its attention.
        taken: returns the row (B, M, ...) of the prompt's queries (B, H, M, Dh), all keys (B, H_kv, M, Dh), the scaling
            and the slots (B, M) that may be attended to.
    """

    def __init__(self, layer: Any, taken: Taken = last_row) -> None:
        self._layer, self._taken = layer, taken
        self._valid: Tensor | None = None
        self._answer_length = 0

    def watch(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Take the row and leave the layer, if it runs for this purpose."""
        if self._valid is not None:
            prompt = query[:, :, : query.shape[2] - self._answer_length]
            raise _RowCaptured(self._taken(prompt, key, scaling, self._valid.to(query.device)))

    def last(
        self, hidden: Tensor, rotary: tuple[Tensor, ...], valid: Tensor, answer_length: int = 0
    ) -> Tensor:
        """Return (B, M): attention of the prompt's last slot to each slot in this layer, mean over heads; 0: not valid.

        Args:
            hidden: (B, M, D) states that enter the layer.
            rotary: tables of the slots.
            valid: (B, M) slots that may be attended to.
            answer_length: slots of an answer after the prompt.

        Cost: the layer's projections of M slots, and one row of attention.
        """
        self._valid, self._answer_length = valid, answer_length
        try:
            # Not by calling the layer: its hooks belong to its real run.
            self._layer.forward(
                hidden, attention_mask=None, past_key_values=None, position_embeddings=rotary
            )
        except _RowCaptured as seen:
            row: Tensor = seen.args[0]
            return row.to(hidden.device)
        finally:
            self._valid = None
        raise RuntimeError("the decoder layer ran without calling its attention")


def mean_row(query: Tensor, key: Tensor, scaling: float, valid: Tensor) -> Tensor:
    """Return (B, M): the attention of the mean valid query, mean over heads."""
    share = (valid / valid.sum(dim=1, keepdim=True))[:, None, : query.shape[2], None]
    mean = (query * share.to(query.dtype)).sum(dim=2, keepdim=True)
    return last_row(mean, key, scaling, valid)


class _RowCaptured(Exception):
    """Carries the row, its argument, out of the layer."""


@signal(
    "next_last_attention",
    "(B, N) `last_attention` in the site's own layer, which has not run yet",
)
class NextLastAttention(DecoderSignal):
    """`last_attention` of the layer after the site."""

    taken: ClassVar[staticmethod[[Tensor, Tensor, float, Tensor], Tensor]] = staticmethod(last_row)

    @classmethod
    def attended(cls, need: Need, site: Site, sites: Sequence[Site]) -> Sequence[int]:
        """Return the layer after the site."""
        return (site.layer,)

    def watchers(self) -> Sequence[tuple[nn.Module, Watcher]]:
        """Return the layer's attention."""
        parts, layer = self.context.parts, self.layer
        self._row = NextRow(parts.decoder.layers[layer], self.taken)
        return [(parts.decoder_attention(layer), self._row.watch)]

    def reach(self, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Run the layer up to its attention."""
        visible = self.context.visible_to_last(stage, self.layer)
        row_values = self._row.last(hidden, rotary, visible, self._answer_length)
        # Another watcher of the layer may have moved the stage to the card of the layer.
        self._captured = self.per_token(stage.move(hidden.device), row_values)


@signal(
    "next_bare_attention",
    "(B, N) `next_last_attention` without rotary positions, softmax over the visual tokens left",
)
class NextBareAttention(NextLastAttention):
    """The same without rotary positions, and among the visual tokens alone. FEATHER (arXiv 2412.13180)."""

    def reach(self, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Run the layer up to its attention with tables that turn nothing."""
        visual = visual_slots(stage) & self.context.visible_to_last(stage, self.layer)
        row_values = self._row.last(hidden, unturned(rotary), visual, self._answer_length)
        # Another watcher of the layer may have moved the stage to the card of the layer.
        self._captured = self.per_token(stage.move(hidden.device), row_values)


@signal(
    "next_mean_attention",
    "(B, N) attention in the site's own layer, which has not run yet, of the mean query of all tokens "
    "up to the last visual one to these tokens, without rotary positions, mean over heads, fp32",
)
class NextMeanAttention(NextLastAttention):
    """Of the mean query up to the last visual token, without rotary positions. PACT (arXiv 2504.08966)."""

    taken = staticmethod(mean_row)

    def reach(self, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Run the layer up to its attention with tables that turn nothing."""
        ahead = visual_slots(stage).flip(1).cumsum(dim=1).flip(1)
        valid = stage.valid & (ahead > 0)
        row_values = self._row.last(hidden, unturned(rotary), valid, self._answer_length)
        # Another watcher of the layer may have moved the stage to the card of the layer.
        self._captured = self.per_token(stage.move(hidden.device), row_values)


@signal(
    "next_visual_keys",
    "(B, H_kv, N, Dh) `visual_keys` of the site's own layer, which has not run yet",
)
class NextVisualKeys(NextLastAttention):
    """`visual_keys` of the layer after the site."""

    @staticmethod
    def taken(query: Tensor, key: Tensor, scaling: float, valid: Tensor) -> Tensor:
        """Return (B, M, H_kv, Dh): the keys."""
        return key.transpose(1, 2)

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, H_kv, n, Dh)."""
        return request.select(self.captured).transpose(1, 2)


def visual_slots(stage: Stage) -> Tensor:
    """Return (B, M) the slots of visual tokens."""
    visual = torch.zeros_like(stage.valid)
    for row, count in enumerate(stage.counts):
        visual[row, stage.slots[row, :count]] = True
    return visual


def unturned(rotary: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return tables that turn nothing."""
    cosine, sine = rotary
    return torch.ones_like(cosine), torch.zeros_like(sine)
