"""Figures that notebooks display."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure


class Drawing(Figure):
    """A matplotlib figure that notebooks display."""

    def _repr_png_(self) -> bytes:
        """Return the figure as PNG."""
        buffer = BytesIO()
        self.savefig(buffer, format="png", bbox_inches="tight")
        return buffer.getvalue()
