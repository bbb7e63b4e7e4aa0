"""What a comparison of runs yields: a panel for each benchmark, of curves of points with intervals and tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from espalier.harness.errors import UserError
from espalier.harness.stats import Interval
from espalier.harness.store.row_text import amount_text, mark

#: The method without reduction, the random baseline, and all controls (methods that no paper proposes).
FULL = "none"
FLOOR = "random"
CONTROLS = (
    FLOOR,
    *("uniform", "pooled", "downsample", "center"),
    *("random_kv", "uniform_kv", "recent_kv"),
)

#: Random baselines: of tokens and of cache entries.
FLOORS = (FLOOR, "random_kv")

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class CurvePoint:
    """One method at one ratio.

    Attributes:
        ratio: share of visual tokens removed.
        score: mean over samples (seeds averaged first).
        retention: score divided by the unpruned score, paired by sample; None without an unpruned run.
        gain: score minus that of random dropping at the same layer under the same policy; None without such a run.
        pvalue: of the paired test of `gain`: McNemar's for right/wrong scores, else a permutation test.
        corrected_pvalue: `pvalue` after Holm's correction over all comparisons with random dropping in the panel.
        loss_pvalue: of the paired test against the unpruned model, Holm-corrected over the panel.
        flops: share of the unreduced prefill's FLOPs; at equal token counts, methods at later layers cost more.
        unread: whether too many answers of one of its runs could not be read.
        keep: tokens that stay of each sample, where the runs set that and not the ratio.
    """

    ratio: float
    score: Interval
    retention: Interval | None = None
    gain: Interval | None = None
    pvalue: float | None = None
    flops: float | None = None
    corrected_pvalue: float | None = None
    loss_pvalue: float | None = None
    scores: Scores | None = field(default=None, repr=False, compare=False)
    unread: bool = False
    keep: int | None = None

    @property
    def mark(self) -> str:
        """The footnote mark after its numbers, or empty."""
        return mark(self.unread)

    @property
    def amount(self) -> float | str:
        """What points of several benchmarks have in common: the ratio, or `64 tokens`, which are other shares there."""
        return self.ratio if self.keep is None else amount_text(self.ratio, self.keep)

    @property
    def verdict(self) -> Literal["above", "below", ""]:
        """Whether the interval of the gain lies above 0, below 0, or contains 0 (empty)."""
        if self.gain is None or self.gain.low <= 0 <= self.gain.high:
            return ""
        return "above" if self.gain.low > 0 else "below"


@dataclass(frozen=True)
class Curve:
    """All points of one method by increasing ratio.

    Attributes:
        floor: name of the random baseline's curve that `gain` refers to.
        layer: decoder layer before which tokens are first removed, 0 for any site before the decoder.
    """

    name: str
    control: bool
    floor: str | None
    points: tuple[CurvePoint, ...]
    layer: int | None = None

    def at(self, ratio: float) -> CurvePoint | None:
        """Return the point at a ratio, if there is one."""
        return next((point for point in self.points if point.ratio == ratio), None)

    def title(self, names: Mapping[str, str]) -> str:
        """Return the name of its config file, plus the words that are not of the file (the engine's policy).

        Args:
            names: of config files, by the names of curves with the same settings; without one the curve's stays.
        """
        words = self.name.split()
        for end in range(len(words), 0, -1):
            file = names.get(" ".join(words[:end]))
            if file is not None:
                return " ".join([file, *words[end:]])
        return self.name


@dataclass(frozen=True)
class BaselineGroup:
    """Random dropping at one site and all curves compared with it, in the order of their display."""

    floor: Curve
    curves: tuple[Curve, ...]

    @property
    def title(self) -> str:
        """Where the methods act."""
        return "between decoder layers" if self.floor.layer else "before the decoder"

    def name(self, curve: Curve, names: Mapping[str, str]) -> str:
        """Return a curve's title, with its layer in brackets where that is not random dropping's."""
        where = f" (layer {curve.layer})" if curve.layer != self.floor.layer else ""
        return f"{curve.title(names)}{where}"


@dataclass(frozen=True)
class CurvePanel:
    """One benchmark: its headline metric, the unpruned score if measured, and the curves.

    Attributes:
        full: the unpruned score.
        notes: lines on excluded results and on marks.
        full_mark: footnote mark of `full`.
        unpruned: the unpruned model's score of each unit of statistics, as `scores` of a point.
    """

    benchmark: str
    metric: str
    n_samples: int
    full: Interval | None
    curves: tuple[Curve, ...]
    notes: tuple[str, ...] = ()
    full_mark: str = ""
    unpruned: Scores | None = field(default=None, repr=False, compare=False)

    @property
    def ratios(self) -> tuple[float, ...]:
        """All ratios that some curve has, increasing."""
        return tuple(sorted({point.ratio for curve in self.curves for point in curve.points}))

    def keep(self, ratio: float) -> int | None:
        """Return the tokens that stay at a ratio, if all points there set them and not the ratio."""
        return only([point.keep for curve in self.curves if (point := curve.at(ratio))])

    def heading(self, ratio: float) -> str:
        """Return the heading of the points at a ratio: the share kept, `10 %`, or `64 tokens (11.11 %)`."""
        keep = self.keep(ratio)
        return share(ratio) if keep is None else f"{amount_text(ratio, keep)} ({share(ratio)})"

    def full_text(self, words: str) -> str:
        """Return the unpruned score in percent, and the settings of its measurement; empty if it was not measured."""
        return "" if self.full is None else f"; {100 * self.full.value:.1f}{self.full_mark} {words}"

    def plain(self, names: Mapping[str, str]) -> CurvePanel:
        """Return the curves that bear their methods' plain names; variants are close to them."""
        titles = [(curve, curve.title(names)) for curve in self.curves]
        plain = [
            replace(curve, name=title) for curve, title in titles if title == curve.name.split()[0]
        ]
        return replace(self, curves=tuple(plain))

    def groups(self) -> list[BaselineGroup]:
        """Return the curves by the random dropping that their gains refer to: before the decoder first, best first.

        Raises:
            UserError: there is no random dropping to compare with.
        """
        last = self.ratios[-1] if self.curves else 0.0
        floors = [
            curve for curve in self.curves if curve.floor is None and curve.name.split()[0] == FLOOR
        ]
        if not floors:
            raise UserError(f"report needs method={FLOOR} among the runs of {self.benchmark}")

        def rank(curve: Curve) -> tuple[float, str]:
            point = curve.at(last)
            return (1.0 if point is None else -point.score.value, curve.name)

        return [
            BaselineGroup(
                floor,
                tuple(
                    sorted((curve for curve in self.curves if curve.floor == floor.name), key=rank)
                ),
            )
            for floor in sorted(floors, key=lambda curve: curve.layer or 0)
        ]


def share(ratio: float) -> str:
    """Return the share that stays at a ratio, in percent."""
    return f"{100 * (1 - ratio):.4g} %"


def percent(part: float | None) -> str:
    """Return a share in percent with one digit after the point, `-` for None."""
    return "-" if part is None else f"{100 * part:.1f} %"


def only(keeps: Collection[int | None]) -> int | None:
    """Return the one count of tokens of some points or runs; None if they differ or set the ratio."""
    return next(iter(keeps)) if len(set(keeps)) == 1 else None
