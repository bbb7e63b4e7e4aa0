"""`keep`: a budget as the visual tokens that stay, `keep=64`, or as a share of them, `keep=10%`, in place of `ratio`.

A share is the run of its ratio: `keep=10%` is `ratio=0.9`, with the same key and row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from espalier.harness.errors import UserError

KEEP, RATIO = "keep", "ratio"

#: Of the two keys each replaces the other one.
REPLACES = {KEEP: RATIO, RATIO: KEEP}

#: Visual tokens of a prompt, at most: no model has so long a context.
MOST = 100_000_000

_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")
_REFERENCE = re.compile(r"\$\{\s*ratio\s*\}")


def ratio_of(keep: Any) -> float | None:
    """Return the ratio that a share such as `10%` stands for, exactly; None for anything else."""
    match = _SHARE.fullmatch(keep) if isinstance(keep, str) else None
    share = Decimal(match[1]) if match else Decimal(0)
    return float(1 - share / 100) if 0 < share <= 100 else None


def settled(keep: Any, cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `ratio` and `keep` of a cell after one has replaced the other.

    Args:
        keep: the value of `keep`.
        cell: the config, with references unresolved.

    Raises:
        UserError: another setting refers to the ratio, and a count of tokens leaves it open.
    """
    ratio = ratio_of(keep)
    if ratio is not None:
        return {RATIO: ratio, KEEP: None}
    if keep is None or not is_count(keep):
        return {}
    if _REFERENCE.search(repr(cell)):
        raise UserError(
            f"keep={keep}: another setting is ${{ratio}}, and a number of tokens is another ratio for each picture; "
            "valid: ratio=<share removed>, keep=<share>%"
        )
    return {RATIO: None}


def is_count(keep: Any) -> bool:
    """Return whether a value is a number of tokens, 1 to `MOST`."""
    return isinstance(keep, int) and not isinstance(keep, bool) and 0 < keep <= MOST
