"""Random dropping at one site, and the methods that are compared with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from espalier.harness.reports.curves.curve_points import Curve, CurvePoint

GainVerdict = Literal["above", "below", ""]


@dataclass(frozen=True)
class BaselineGroup:
    """Random dropping at one site and all curves compared with it, ordered by score at the smallest share kept."""

    floor: Curve
    curves: tuple[Curve, ...]

    @property
    def title(self) -> str:
        """Where the methods act."""
        return "between decoder layers" if self.floor.layer else "before the decoder"


def verdict(point: CurvePoint | None) -> GainVerdict:
    """Return whether the interval of the gain lies above 0, below 0, or contains 0 (empty)."""
    if point is None or point.gain is None or point.gain.low <= 0 <= point.gain.high:
        return ""
    return "above" if point.gain.low > 0 else "below"


def at(curve: Curve, ratio: float) -> CurvePoint | None:
    """Return the point of a curve at a ratio, if it has one."""
    return next((point for point in curve.points if point.ratio == ratio), None)


def title_of(curve: Curve, names: Mapping[str, str]) -> str:
    """Return the config file name of a curve, or its own name if no config file has the same settings."""
    return title(curve.name, names)


def title(name: str, names: Mapping[str, str]) -> str:
    """Return the config file name for a curve name, plus the words that are not of the file (the engine's policy)."""
    words = name.split()
    for end in range(len(words), 0, -1):
        file = names.get(" ".join(words[:end]))
        if file is not None:
            return " ".join([file, *words[end:]])
    return name
