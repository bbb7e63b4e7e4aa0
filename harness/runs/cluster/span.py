"""A quantity that is known between two bounds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Span(NamedTuple):
    """The least and the largest value of a quantity."""

    low: float
    high: float

    def times(self, factor: float) -> Span:
        """Return the span of a multiple; `factor` is not negative."""
        return Span(self.low * factor, self.high * factor)

    @classmethod
    def total(cls, spans: Iterable[Span]) -> Span:
        """Return the sum of spans, from the sum of the least to that of the largest."""
        entries = list(spans)
        return cls(sum(span.low for span in entries), sum(span.high for span in entries))

    @classmethod
    def around(cls, spans: Iterable[Span]) -> Span:
        """Return the span from the least to the largest of several."""
        entries = list(spans)
        return cls(min(span.low for span in entries), max(span.high for span in entries))
