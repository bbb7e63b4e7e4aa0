"""Positions, read from the layout without a capture: `text_positions`, `visual_positions`, `all_positions`, `tile`."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.harness.engine.layout import take
from espalier.harness.engine.signals.producer import Producer, ViewRequest


class Tile(Producer):
    """Crop that each visual token lies in."""

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n)."""
        return take(request.layout.tile[request.rows], request.origin, -1)


class VisualPositions(Producer):
    """Position of each visual token in its row's prompt."""

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, n)."""
        return take(request.layout.visual[request.rows], request.origin, -1) - _padding_length(
            request
        )


class AllPositions(Producer):
    """Position of each visual token, including dropped ones."""

    def view_values(self, request: ViewRequest) -> Tensor:
        """Return (b, M), -1 where a row has fewer."""
        return torch.where(
            request.real, request.layout.visual[request.rows] - _padding_length(request), -1
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
