"""Luma of the pixels that each visual token was made of: `luma`.

Nothing is captured: it is computed from the inputs when first asked for in a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from espalier.harness.engine.layout import take
from espalier.harness.engine.signals.producer import Asked, Producer


class Luma(Producer):
    """The same at every site."""

    shared = True
    _luma: Tensor | None = None

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Forget the last pass's pictures."""
        self._luma, self._inputs = None, inputs

    def units(self) -> Tensor:
        """Return (units, h + 2, w + 2)."""
        if self._luma is None:
            self._luma = self.context.parts.pictures(self._inputs).luma()
        return self._luma

    def hand_over(self, asked: Asked) -> Tensor:
        """Return (b, n, h + 2, w + 2)."""
        luma = self.units() if self.given is None else self.given
        # Such tokens are one unit.
        unit = take(asked.layout.source[asked.rows], asked.origin, -2)[..., 0]
        return luma[unit.to(luma.device)]
