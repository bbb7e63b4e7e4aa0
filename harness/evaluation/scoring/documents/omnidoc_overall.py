"""The overall score of OmniDocBench."""

from __future__ import annotations

from collections.abc import Sequence


def of_pages(parts: Sequence[Sequence[float | None]]) -> float:
    """Return the mean of the parts' means, each over the pages that have the part; a part without pages is left out.

    Args:
        parts: scores of text, formulas and tables of each page, 1 is perfect, None for a missing part.

    Raises:
        ZeroDivisionError: no page has any part.
    """
    columns = [
        [value for value in column if value is not None] for column in zip(*parts, strict=True)
    ]
    means = [sum(column) / len(column) for column in columns if column]
    return float(sum(means) / len(means))
