"""What a run removes, as the text of labels and tables."""

from __future__ import annotations


def amount_text(ratio: float, keep: int | None) -> str:
    """Return the share of visual tokens removed, `0.9`; or the tokens that stay where these are set, `64 tokens`."""
    return f"{ratio:g}" if keep is None else f"{keep} token{'s' if keep > 1 else ''}"
