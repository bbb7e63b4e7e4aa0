"""The speed-up that the arithmetic allows, beside the one that was measured.

A prefill that spends a share s of the full FLOPs can be at most 1/s times as fast, as long as both
run at the same rate. A measured speed-up above the bound means that the timer leaves something out,
or that the baseline was slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Speedup:
    """One row against the same model without reduction; factors, larger is faster.

    Attributes:
        bound: full over spent FLOPs of the language model.
        bound_with_tower: the same with tower and projector on both sides; None if the row lacks
            them.
        measured: baseline over row, language-model prefill time with selection inside.
        measured_with_tower: the same with the time of the tower on both sides.

    """

    bound: float
    bound_with_tower: float | None
    measured: float
    measured_with_tower: float

    @property
    def reached(self) -> float:
        """Share of the bound that was measured; above 1 the timing must be explained."""
        return self.measured / self.bound


def speedup(row: Row, baseline: Row) -> Speedup:
    """Compare a row with its baseline, both as run.py stores them.

    Raises:
        ValueError: the rows differ in model or benchmark, or the baseline's prefill is not full.
    """
    for key in ("model", "benchmark"):
        if row[key] != baseline[key]:
            raise ValueError(f"{key} differs: {row[key]!r} against {baseline[key]!r}")
    if baseline["flops"]["share_of_full"] != 1:
        share = baseline["flops"]["share_of_full"]
        raise ValueError(f"the baseline spends {share} of the full FLOPs, not all of them")
    with_tower = row["flops"].get("share_with_tower")
    return Speedup(
        bound=1 / row["flops"]["share_of_full"],
        bound_with_tower=None if with_tower is None else 1 / with_tower,
        measured=_prefill(baseline) / _prefill(row),
        measured_with_tower=_first_token(baseline) / _first_token(row),
    )


def ceiling(tower: float, language: float) -> float:
    """Return the speed-up at which a method after the tower ends when it keeps no token at all.

    Args:
        tower: FLOPs that no such method can save (tower and projector).
        language: FLOPs of the language model's visual tokens.
    """
    return (tower + language) / tower


def _prefill(row: Row) -> float:
    return float(row["time"]["prefill_ms"])


def _first_token(row: Row) -> float:
    return float(row["time"]["vision_ms"]) + _prefill(row)
