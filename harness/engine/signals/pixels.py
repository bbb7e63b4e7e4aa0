"""Luma of the pixels that each visual token was made of: `luma`.

Nothing is captured: it is computed from the inputs when first needed in a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from espalier.harness.engine.layout import take
from espalier.harness.engine.signals.producer import Producer, ViewRequest


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
