"""The overall score of OmniDocBench from what its pages have."""

from __future__ import annotations

from collections.abc import Sequence


def of_pages(parts: Sequence[Sequence[float | None]]) -> float:
    """Return the mean of the parts' means, each over the pages that have it; a part that no page has is left out.

    Args:
        parts: of each page its text, formulas and tables, 1 being perfect, None where it has none.

    Raises:
        ZeroDivisionError: no page has anything.
    """
    columns = [
        [value for value in column if value is not None] for column in zip(*parts, strict=True)
    ]
    means = [sum(column) / len(column) for column in columns if column]
    return float(sum(means) / len(means))
