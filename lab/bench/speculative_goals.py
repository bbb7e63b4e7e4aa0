"""Targets of parallel decoding in `make bench-sd`, and a verdict on each from its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.harness.stats import rate_ratio_interval

#: Lower bounds of overlap and of the share of the predicted speed-up; upper bound of the state machine's time over T_p.
OVERLAP, REACHED, OVERHEAD = 0.8, 0.85, 0.02


def targets(rows: Sequence[Mapping[str, Any]], overhead: float) -> list[dict[str, Any]]:
    """Return the targets of parallel decoding with their verdicts."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = [row for row in rows if row["kind"] == kind]
        plain_sd = [row for row in of_kind if row["method"].startswith("vanilla_sd")]
        best = max(plain_sd, key=lambda row: row["extra"]["speculative"]["speedup_end_to_end"])
        for row in of_kind:
            if row["extra"]["speculative"]["overlap"]:
                lines += [
                    {"kind": kind, "method": row["method"], **goal.entry()}
                    for goal in goals(row, best, overhead)
                ]
    return lines


@dataclass(frozen=True)
class Goal:
    """A target with its measured value.

    Attributes:
        name: the goal in words.
        value: as measured.
        target: the bound on the value.
        interval: of the value, None if it has none.
        bound: upper limit of the value, if known.
        lower_bound: whether the value must reach the target, else stay below it.
    """

    name: str
    value: float
    target: float
    interval: tuple[float, float] | None = None
    bound: float | None = None
    lower_bound: bool = True

    @property
    def verdict(self) -> str:
        """Verdict: `met`, `missed`, `open` if the interval contains the target, or `not believable`."""
        low, high = self.interval or (self.value, self.value)
        if self.bound is not None and low > self.bound:
            return "not believable"
        if not self.lower_bound:
            return "met" if high < self.target else "missed" if low >= self.target else "open"
        return "met" if low >= self.target else "missed" if high < self.target else "open"

    def entry(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "what": self.name,
            "value": self.value,
            "asked": self.target,
            "interval": self.interval,
            "bound": self.bound,
            "least": self.lower_bound,
            "verdict": self.verdict,
        }


def goals(row: Mapping[str, Any], best: Mapping[str, Any], overhead: float) -> list[Goal]:
    """Return the targets of one parallel row.

    Args:
        row: the row.
        best: the row of plain speculative decoding with the best window, on the same answers.
        overhead: milliseconds of a round of the state machine alone.
    """
    block, best_block = row["extra"]["speculative"], best["extra"]["speculative"]
    decode, bound = block["speedup_decode_interval"], block["speedup_bound"]
    over = rate_ratio_interval(
        [[*ours, *theirs] for ours, theirs in zip(row["seconds"], best["seconds"], strict=True)]
    )
    reached = [
        Goal("decode over plain decoding", block["speedup_decode"], 1.0, decode, bound),
        Goal(
            "end to end over plain decoding",
            block["speedup_end_to_end"],
            1.0,
            block["speedup_end_to_end_interval"],
            # No draft shortens the prefill, so the end-to-end gain is at most that of decoding.
            max(bound, 1.0),
        ),
        Goal(
            "end to end over the best vanilla SD",
            block["speedup_end_to_end"] / best_block["speedup_end_to_end"],
            1.0,
            (over.low, over.high),
        ),
        Goal("machine over T_p", overhead / block["target_ms"], OVERHEAD, lower_bound=False),
    ]
    if block["overlap_efficiency"] is not None:  # not measurable with two streams of one GPU
        reached.append(Goal("overlap", block["overlap_efficiency"], OVERLAP))
    for name, promised in (("", "speedup_predicted"), (" by windows", "speedup_predicted_window")):
        scaled = tuple(end / block[promised] for end in decode)
        value = block["speedup_decode"] / block[promised]
        reached.append(Goal(f"measured over predicted{name}", value, REACHED, scaled))
    return reached
