"""States in the decoder: those that enter the site's layer, the decoder's input, and a layer's queries and keys.

States are captured when the site is reached, without watching a module; the decoder's input once a pass, the same at
every site; queries and keys in the layer before the site, with rotary positions applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from espalier.harness.engine.attention_probe import Watcher
from espalier.harness.engine.layout import Layout, Stage, take
from espalier.harness.engine.signals.producer import (
    DecoderSignal,
    Producer,
    ViewRequest,
    word_states,
)


class ReachedStates(DecoderSignal):
    """Base of signals taken from the states themselves."""

    def watchers(self) -> list[tuple[nn.Module, Watcher]]:
        """Watch nothing."""
        return []


class TextStates(ReachedStates):
    """Words as they are."""

    def reach(self, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Take the words."""
        self._captured = word_states(hidden, stage.words)

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, T, D)."""
        return self.captured[request.rows]


class TextNormed(TextStates):
    """Words after the decoder's final norm."""

    def reach(self, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Take the words and normalise them."""
        self._captured = self.context.parts.decoder.norm(word_states(hidden, stage.words))


class Normed(ReachedStates):
    """Visual tokens after the decoder's final norm."""

    def reach(self, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Take the visual tokens and normalise them."""
        self._captured = self.context.parts.decoder.norm(self.per_token(stage, hidden))

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n, D)."""
        return request.select(self.captured)


class DecoderInput(Producer):
    """Base of signals taken from the decoder's input."""

    shared = True
    _states: Tensor | None = None

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Drop the tokens of the last pass."""
        self._states = None

    @property
    def states(self) -> Tensor:
        """Tokens taken in this pass."""
        assert self._states is not None  # the decoder is entered before any site
        return self._states


class Projected(DecoderInput):
    """Visual tokens of the view."""

    def enter(self, layout: Layout, hidden: Tensor) -> None:
        """Take all visual tokens."""
        self._states = take(hidden, layout.visual, -2)

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n, D)."""
        return request.select(self.states)


class AllProjected(Projected):
    """Visual tokens, including dropped ones."""

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, M, D)."""
        real = request.real.to(self.states.device)
        return self.states[request.rows] * real.unsqueeze(-1)


class TextEmbeddings(DecoderInput):
    """Words."""

    def enter(self, layout: Layout, hidden: Tensor) -> None:
        """Take the words."""
        self._states = word_states(hidden, layout.words)

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, T, D)."""
        return self.states[request.rows]


class VisualKeys(DecoderSignal):
    """Keys of the visual tokens."""

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Keep (B, N, H_kv, Dh)."""
        return self.per_token(stage, key.transpose(1, 2))

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, H_kv, n, Dh)."""
        return request.select(self.captured).transpose(1, 2)


class TextKeys(DecoderSignal):
    """Keys of the words."""

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Keep (B, H_kv, T, Dh)."""
        return word_states(key, stage.words)

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, H_kv, T, Dh)."""
        return self.captured[request.rows]


class TextQueries(TextKeys):
    """Queries of the words."""

    def capture(self, stage: Stage, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Keep (B, H, T, Dh)."""
        return word_states(query, stage.words)
