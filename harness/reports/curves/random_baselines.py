"""Random dropping at one place, and the methods that are compared with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from espalier.harness.reports.curves.curve_points import Curve, Point

Verdict = Literal["above", "below", ""]


@dataclass(frozen=True)
class Group:
    """Random dropping at one place and all that is compared with it, best at the smallest share first."""

    floor: Curve
    curves: tuple[Curve, ...]

    @property
    def title(self) -> str:
        """Where the methods act."""
        return "between decoder layers" if self.floor.place else "before the decoder"


def verdict(point: Point | None) -> Verdict:
    """Say whether the interval of the gain lies above 0, below 0, or around it."""
    if point is None or point.gain is None or point.gain.low <= 0 <= point.gain.high:
        return ""
    return "above" if point.gain.low > 0 else "below"


def at(curve: Curve, ratio: float) -> Point | None:
    """Return the point of a curve at a ratio, if it has one."""
    return next((point for point in curve.points if point.ratio == ratio), None)


def title_of(curve: Curve, names: Mapping[str, str]) -> str:
    """Return the name of the curve's config file, or its own where no file says the same."""
    return title(curve.name, names)


def title(name: str, names: Mapping[str, str]) -> str:
    """Return the config file's name for a curve's name, with what the name says beyond it: the engine's policy."""
    words = name.split()
    for end in range(len(words), 0, -1):
        file = names.get(" ".join(words[:end]))
        if file is not None:
            return " ".join([file, *words[end:]])
    return name
