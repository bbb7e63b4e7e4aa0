"""What a comparison of runs yields: a panel for each benchmark, a frame of points with intervals and tests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from espalier.harness.errors import UserError
from espalier.harness.stats import Interval
from espalier.harness.store.row_text import FOOTNOTE, amount_text, mark

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


#: Columns of a panel's points: one line for each curve and ratio, curves of controls last, ratios increasing.
POINT = (
    # Name of the curve; whether it is a control; name of the random baseline that `gain` refers to; decoder layer
    # before which tokens are first removed, 0 for any site before the decoder.
    *("curve", "control", "floor", "layer"),
    # Share of visual tokens removed; tokens that stay of each sample, where the runs set that and not the ratio; what
    # points of several benchmarks have in common, the ratio or `64 tokens`, which are other shares there.
    *("ratio", "keep", "amount"),
    # Intervals: mean over samples (seeds averaged first); this over the unpruned score, paired by sample, None without
    # an unpruned run; less that of random dropping at the same layer under the same policy, None without such a run.
    *("score", "retention", "gain"),
    # p-values of the paired tests, McNemar's for right or wrong scores, else a permutation test: of `gain`, then after
    # Holm's correction over all comparisons with random dropping in the panel; against the unpruned model, corrected.
    *("gain_p", "gain_p_holm", "lost_p"),
    # The same against the best method at the ratio: corrected over the panel, 1 for the best, None for controls.
    "best_p",
    # Share of the unreduced prefill's FLOPs: at equal token counts, methods at later layers cost more.
    "flops_share",
    # Scores by unit of statistics; whether too many answers of a run could not be read, and the footnote mark for it.
    *("scores", "unread", "mark"),
)


def verdict(gain: Interval | None) -> str:
    """Return whether the interval of a gain lies `above` 0, `below` 0, or contains 0 (empty)."""
    if gain is None or gain.low <= 0 <= gain.high:
        return ""
    return "above" if gain.low > 0 else "below"


def title_of(curve: str, names: Mapping[str, str]) -> str:
    """Return the name of a curve's config file, plus the words that are not of the file (the engine's policy).

    Args:
        curve: its name.
        names: of config files, by the names of curves with the same settings; without one the curve's stays.
    """
    words = curve.split()
    for end in range(len(words), 0, -1):
        file = names.get(" ".join(words[:end]))
        if file is not None:
            return " ".join([file, *words[end:]])
    return curve


def methods_of(curves: Collection[str]) -> set[str]:
    """Return the names of the methods of curves."""
    return {curve.split()[0] for curve in curves}


def grid(
    cells: pd.DataFrame,
    line: str,
    column: str,
    heads: Collection[Any],
    text: Callable[[Any], str],
    gap: str = "-",
) -> dict[Any, list[str]]:
    """Return the texts of a frame's rows by two of its columns: a list for each value of the first, in their order.

    Args:
        cells: the rows.
        line: the first column.
        column: the second one.
        heads: its values, in the order of each list.
        text: of a row.
        gap: where no row has both values.
    """
    texts: dict[Any, dict[Any, str]] = {}
    for cell in cells.itertuples():
        line_texts = texts.setdefault(getattr(cell, line), dict.fromkeys(heads, gap))
        line_texts[getattr(cell, column)] = text(cell)
    return {first: [*line_texts.values()] for first, line_texts in texts.items()}


@dataclass(frozen=True)
class BaselineGroup:
    """Random dropping at one site and all curves compared with it.

    Attributes:
        layer: of random dropping, as in `POINT`.
        points: of random dropping, then of the curves in the order of their display.
    """

    layer: int | None
    points: pd.DataFrame

    @property
    def title(self) -> str:
        """Where the methods act."""
        return "between decoder layers" if self.layer else "before the decoder"

    def names(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the title of each curve, with its layer in brackets where that is not random dropping's."""
        layers = dict(zip(self.points.curve, self.points.layer, strict=True))
        return {
            curve: title_of(curve, names) + (f" (layer {layer})" if layer != self.layer else "")
            for curve, layer in layers.items()
        }


@dataclass(frozen=True, eq=False)
class CurvePanel:
    """One benchmark: its headline metric, the unpruned score if measured, and the curves.

    Attributes:
        full: the unpruned score.
        points: of all curves, columns as in `POINT`.
        notes: lines on excluded results and on marks.
        full_mark: footnote mark of `full`.
        unpruned: the unpruned model's score of each unit of statistics, as `scores` of a point.
    """

    benchmark: str
    metric: str
    n_samples: int
    full: Interval | None
    points: pd.DataFrame
    notes: tuple[str, ...] = ()
    full_mark: str = ""
    unpruned: Scores | None = None
    model: str = ""

    @property
    def ratios(self) -> tuple[float, ...]:
        """All ratios that some curve has, increasing."""
        return tuple(sorted(set(self.points.ratio)))

    def keep(self, ratio: float) -> int | None:
        """Return the tokens that stay at a ratio, if all points there set them and not the ratio."""
        return only(self.points.keep[self.points.ratio == ratio])

    @property
    def headings(self) -> dict[float, str]:
        """The heading of the points at each ratio: the share kept, `10 %`, or `64 tokens (11.11 %)`."""
        keeps = {ratio: self.keep(ratio) for ratio in self.ratios}
        return {
            ratio: share(ratio) if keep is None else f"{amount_text(ratio, keep)} ({share(ratio)})"
            for ratio, keep in keeps.items()
        }

    def full_text(self, words: str) -> str:
        """Return the unpruned score in percent, and the settings of its measurement; empty if it was not measured."""
        return "" if self.full is None else f"; {100 * self.full.value:.1f}{self.full_mark} {words}"

    def plain(self, names: Mapping[str, str]) -> CurvePanel:
        """Return the curves that bear their methods' plain names; variants are close to them."""
        titles = pd.Series([title_of(curve, names) for curve in self.points.curve], dtype=object)
        is_plain = [
            title == curve.split()[0]
            for title, curve in zip(titles, self.points.curve, strict=True)
        ]
        return replace(self, points=self.points.assign(curve=titles)[is_plain])

    def groups(self) -> list[BaselineGroup]:
        """Return the curves by the random dropping that their gains refer to: before the decoder first, best first.

        Raises:
            UserError: there is no random dropping to compare with.
        """
        last = self.points[self.points.ratio == max(self.ratios, default=0.0)]
        # A curve without a point at the largest ratio is last.
        ranks = {point.curve: -point.score.value for point in last.itertuples()}
        ranked = self.points.assign(rank=[ranks.get(curve, 1.0) for curve in self.points.curve])
        ranked = ranked.sort_values(["rank", "curve"], kind="stable")
        floors = {
            point.curve: point.layer
            for point in self.points.itertuples()
            if point.floor is None and point.curve.split()[0] == FLOOR
        }
        if not floors:
            raise UserError(f"report needs method={FLOOR} among the runs of {self.benchmark}")
        return [
            BaselineGroup(
                layer, pd.concat([ranked[ranked.curve == floor], ranked[ranked.floor == floor]])
            )
            for floor, layer in sorted(floors.items(), key=lambda pair: pair[1] or 0)
        ]


def panels_of(points: pd.DataFrame) -> list[CurvePanel]:
    """Return the panels of a frame of points, without scores of samples."""

    def interval(point: pd.Series, name: str) -> Interval:
        return Interval(*(point[f"{name}{end}"] for end in ("", "_low", "_high")))

    panels = []
    for (model, benchmark), block in points.groupby(["model", "benchmark"], sort=False):
        full, pruned = block[block.curve == FULL], block[block.curve != FULL].astype(object)
        scores = {index: interval(point, "score") for index, point in block.iterrows()}
        panels.append(
            CurvePanel(
                model=model,
                benchmark=benchmark,
                metric=block.metric.iloc[0],
                n_samples=block.n_samples.iloc[0],
                full=scores[full.index[0]] if len(full) else None,
                full_mark=mark(bool(full.unread.any())),
                points=pruned.assign(
                    score=pd.Series(scores, dtype=object).reindex(pruned.index),
                    keep=[None if pd.isna(keep) else int(keep) for keep in pruned.keep],
                    mark=[mark(bool(unread)) for unread in pruned.unread],
                ),
                notes=(FOOTNOTE,) if block.unread.any() else (),
            )
        )
    return panels


def share(ratio: float) -> str:
    """Return the share that stays at a ratio, in percent."""
    return f"{100 * (1 - ratio):.4g} %"


def percent(part: float | None) -> str:
    """Return a share in percent with one digit after the point, `-` for None."""
    return "-" if part is None else f"{100 * part:.1f} %"


def only(keeps: Collection[int | None]) -> int | None:
    """Return the one count of tokens of some points or runs; None if they differ or set the ratio."""
    return next(iter(keeps)) if len(set(keeps)) == 1 else None
