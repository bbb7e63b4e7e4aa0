"""States in the decoder, and properties of tokens that need no capture.

States are captured when the site is reached, without watching a module; the decoder's input once a pass, the same at
every site; queries and keys in the layer before the site, with rotary positions applied. Positions and crops (`tile`)
come from the layout, `luma` from the pass's inputs when it is first needed, `prior` from the session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from espalier.harness.engine.attention_probe import Watcher
from espalier.harness.engine.layout import Layout, Stage, take
from espalier.harness.engine.priors import Prior, resize_prior
from espalier.harness.engine.signals.producer import (
    Context,
    DecoderSignal,
    Producer,
    ViewRequest,
    word_states,
)
from espalier.harness.engine.signals.table import signal
from espalier.methods.base import MethodError, Need, Site


class ReachedStates(DecoderSignal):
    """Base of signals taken from the states themselves."""

    def watchers(self) -> list[tuple[nn.Module, Watcher]]:
        """Watch nothing."""
        return []


@signal(
    "text_states",
    "(B, T, D) words as they enter the site's layer, 0 where a row has fewer",
)
@signal(
    "text_normed",
    "(B, T, D) words as they enter the site's layer, after the decoder's final norm, 0 where a row "
    "has fewer",
)
class TextStates(ReachedStates):
    """Words as they are, or after the decoder's final norm."""

    by_row = True

    def reach(self, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Take the words."""
        self._captured = word_states(hidden, stage.words)
        if self.need.signal == "text_normed":
            self._captured = self.context.parts.decoder.norm(self._captured)


@signal(
    "normed",
    "(B, N, D) visual tokens as they enter the site's layer, after the decoder's final norm",
)
class Normed(ReachedStates):
    """Visual tokens after the decoder's final norm."""

    def reach(self, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Take the visual tokens and normalise them."""
        self._captured = self.context.parts.decoder.norm(self.per_token(stage, hidden))


class DecoderInput(ReachedStates):
    """Base of signals taken from the decoder's input."""

    shared = True

    @classmethod
    def attended(cls, need: Need, site: Site, sites: Sequence[Site]) -> Sequence[int]:
        """Return no layer."""
        return ()


@signal(
    "projected",
    "(B, N, D) visual tokens as they entered the decoder",
)
class Projected(DecoderInput):
    """Visual tokens of the view."""

    def enter(self, layout: Layout, hidden: Tensor) -> None:
        """Take all visual tokens."""
        self._captured = take(hidden, layout.visual, -2)


@signal(
    "all_projected",
    "(B, M, D) visual tokens as they entered the decoder, those dropped since included, 0 where a row "
    "has fewer",
)
class AllProjected(Projected):
    """Visual tokens, including dropped ones."""

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, M, D)."""
        real = request.real.to(self.captured.device)
        return self.captured[request.rows] * real.unsqueeze(-1)


@signal(
    "text_embeddings",
    "(B, T, D) words as they entered the decoder, 0 where a row has fewer",
)
class TextEmbeddings(DecoderInput):
    """Words."""

    by_row = True

    def enter(self, layout: Layout, hidden: Tensor) -> None:
        """Take the words."""
        self._captured = word_states(hidden, layout.words)


@signal(
    "visual_keys",
    "(B, H_kv, N, Dh) keys of the visual tokens, rotary positions applied",
)
class VisualKeys(DecoderSignal):
    """Keys of the visual tokens."""

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Keep (B, N, H_kv, Dh)."""
        return self.per_token(stage, key.transpose(1, 2))

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, H_kv, n, Dh)."""
        return request.select(self.captured).transpose(1, 2)


@signal(
    "text_keys",
    "(B, H_kv, T, Dh) keys of the prompt's words, rotary positions applied, 0 where a row has fewer",
)
@signal(
    "text_queries",
    "(B, H, T, Dh) queries of the prompt's words, rotary positions applied, 0 where a row has fewer",
)
class TextHeads(DecoderSignal):
    """Keys or queries of the words."""

    by_row = True

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Keep (B, heads, T, Dh)."""
        return word_states(query if self.need.signal == "text_queries" else key, stage.words)


@signal(
    "layer_normed",
    "(B, N, D) visual tokens as they enter the site's layer, after that layer's input norm; at "
    "`block` sites",
)
class LayerNormed(ReachedStates):
    """Visual tokens after the layer's input norm."""

    def reach(self, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Take the visual tokens and normalise them."""
        layer = self.context.parts.decoder.layers[self.site.layer]
        self._captured = layer.input_layernorm(self.per_token(stage, hidden))


@signal(
    "tile",
    "(B, N) crop of a high-resolution image that each visual token lies in, from 1; 0 for the global "
    "view",
)
class Tile(Producer):
    """Crop that each visual token lies in."""

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n)."""
        return take(request.layout.tile[request.rows], request.origin, -1)


@signal(
    "visual_positions",
    "(B, N) place of each visual token in the row's prompt",
)
class VisualPositions(Producer):
    """Position of each visual token in its row's prompt."""

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n)."""
        return take(request.layout.visual[request.rows], request.origin, -1) - _padding_length(
            request
        )


@signal(
    "all_positions",
    "(B, M) place of each visual token in the row's prompt, those dropped since included, -1 where a "
    "row has fewer",
)
class AllPositions(Producer):
    """Position of each visual token, including dropped ones."""

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, M), -1 where a row has fewer."""
        return torch.where(
            request.real, request.layout.visual[request.rows] - _padding_length(request), -1
        )


@signal(
    "text_positions",
    "(B, T) place of each word in the row's prompt, -1 where a row has fewer",
)
class TextPositions(Producer):
    """Position of each word."""

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, T), -1 where a row has fewer."""
        words = request.layout.words[request.rows]
        return torch.where(words < 0, words, words - _padding_length(request))


def _padding_length(request: ViewRequest) -> Tensor:
    """Return (b, 1): the number of padding slots before each row's prompt."""
    return (~request.layout.valid[request.rows]).sum(1, keepdim=True)


@signal(
    "luma",
    "(B, N, h + 2, w + 2) BT.601 luma in [-1, 1] of the pixels that each visual token was made of, as "
    "the tower sees them, with one pixel of border on each side, 0 outside the picture; fp32 or wider",
    units=True,
)
class Luma(Producer):
    """Luma, the same at every site."""

    shared = True
    _luma: Tensor | None = None

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Drop the last pass's images."""
        self._luma, self._inputs = None, inputs

    def units(self) -> Tensor:
        """Return (units, h + 2, w + 2)."""
        if self._luma is None:
            self._luma = self.context.parts.pictures(self._inputs).luma()
        return self._luma

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n, h + 2, w + 2)."""
        luma = self.units() if self.kept_units is None else self.kept_units
        # Tokens with luma are single units.
        unit = take(request.layout.source[request.rows], request.origin, -2)[..., 0]
        return luma[unit.to(luma.device)]


@signal(
    "prior",
    "(B, N) calibrated mean of `last_attention` over many images at the token's place in its view "
    "(see harness/tools/calibration), fp32",
)
class CalibratedPrior(Producer):
    """The session's prior, resized to each row's grid.

    Raises:
        MethodError: the session has none.
    """

    def __init__(self, context: Context, site: Site, need: Need) -> None:
        super().__init__(context, site, need)
        if context.prior is None:
            raise MethodError("signal 'prior' needs a calibration (python -m espalier calibrate)")
        self._prior: Prior = context.prior

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n)."""
        grid = request.layout.grid[request.rows]
        prior = tuple(values.to(grid.device) for values in self._prior)
        return take(resize_prior(prior, grid), request.origin, -1)
