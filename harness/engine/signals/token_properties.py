"""Properties of tokens that need no capture: positions, crops, the luma of their pixels, values of a calibration.

Positions and crops (`tile`) come from the layout, `luma` from the pass's inputs when it is first needed, `prior` from
the session.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from espalier.harness.engine.artifacts import Prior, resize_prior
from espalier.harness.engine.layout import take
from espalier.harness.engine.signals.producer import Context, Producer, ViewRequest
from espalier.methods.base import MethodError, Need, Site


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
