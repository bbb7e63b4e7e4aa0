"""Places, read off the layout; nothing is captured: `text_positions`, `visual_positions`, `all_positions`, `tile`."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.harness.engine.layout import take
from espalier.harness.engine.signals.producer import Asked, Producer


class Tile(Producer):
    """Crop that each visual token lies in."""

    def hand_over(self, asked: Asked) -> Tensor:
        """Return (b, n)."""
        return take(asked.layout.tile[asked.rows], asked.origin, -1)


class VisualPositions(Producer):
    """Place of each visual token in its row's prompt."""

    def hand_over(self, asked: Asked) -> Tensor:
        """Return (b, n)."""
        return take(asked.layout.visual[asked.rows], asked.origin, -1) - _padding(asked)


class AllPositions(Producer):
    """Place of each visual token, those dropped since included."""

    def hand_over(self, asked: Asked) -> Tensor:
        """Return (b, M), -1 where a row has fewer."""
        return torch.where(asked.real, asked.layout.visual[asked.rows] - _padding(asked), -1)


class TextPositions(Producer):
    """Place of each word."""

    def hand_over(self, asked: Asked) -> Tensor:
        """Return (b, T), -1 where a row has fewer."""
        words = asked.layout.words[asked.rows]
        return torch.where(words < 0, words, words - _padding(asked))


def _padding(asked: Asked) -> Tensor:
    """Return (b, 1): how many slots of padding stand before each row's prompt."""
    return (~asked.layout.valid[asked.rows]).sum(1, keepdim=True)
