"""Inputs of the decoder: `projected`, `all_projected`, `text_embeddings`.

Captured once a pass, the same at every site.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from espalier.harness.engine.layout import Layout, take
from espalier.harness.engine.signals.producer import Producer, ViewRequest, word_states


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
