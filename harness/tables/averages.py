"""Averages of a table by its paper's rule and by one that treats all rows alike, and printed ones that do not follow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from harness.tables.filling import Filled
from harness.tables.published import Average, Cell

#: A line's cells by what they are of.
Line = Mapping[tuple[str, str], Filled]


@dataclass(frozen=True)
class Averaged:
    """A line's averages.

    Attributes:
        cell: the printed average.
        follows: the paper's rule on the printed cells of the line; None where these do not give it.
        slack: how far rounding of what is printed may move it.
        consistent: the same over the benchmarks that all lines of the model have.
        own: the paper's rule on what was measured; None unless all that it takes is.
        shared: how many benchmarks all lines have.
    """

    cell: Cell
    follows: float | None
    slack: float
    consistent: float | None
    own: float | None
    shared: int

    @property
    def remark(self) -> str:
        """What is wrong in print, or nothing."""
        if self.follows is None or self.cell.number is None:
            return ""
        if abs(self.cell.number - self.follows) <= self.slack + 1e-9:
            return ""
        return f"printed {self.cell.value}, the printed cells give {self.follows:.{max(self.cell.digits, 2)}f}"


def averages(filled: Sequence[Filled], rule: Average | None) -> list[Averaged]:
    """Return the averages of every line of a table that prints one."""
    if rule is None:
        return []
    found = []
    for group in _grouped(filled, ("model", "metric")).values():
        found += _of_model([one for one in group if one.cell.benchmark == rule.benchmark], filled, rule)
    return found


def with_averages(filled: Sequence[Filled], found: Iterable[Averaged]) -> list[Filled]:
    """Return the cells, printed averages with what was measured of them and what is wrong in print."""
    by_key = {one.cell.key: one for one in found}
    out = []
    for one in filled:
        average = by_key.get(one.cell.key)
        if average is None:
            out.append(one)
        else:
            out.append(replace(one, value=average.own, remark=average.remark))
    return out


def _of_model(printed: Sequence[Filled], filled: Sequence[Filled], rule: Average) -> list[Averaged]:
    if not printed:
        return []
    first = printed[0].cell
    metric = first.metric if rule.rule == "mean" else None
    lines: dict[tuple[str, str], dict[tuple[str, str], Filled]] = defaultdict(dict)
    reference: dict[tuple[str, str], Filled] = {}
    for one in filled:
        cell = one.cell
        if cell.model != first.model or cell.benchmark == rule.benchmark:
            continue
        if metric is not None and cell.metric != metric:
            continue
        if cell.metric in RELATIVE:
            continue
        where = (cell.benchmark, cell.split)
        lines[cell.method, cell.budget][where] = one
        if cell.method == rule.reference:
            reference.setdefault(where, one)
    takes = [lines[one.cell.method, one.cell.budget] for one in printed]
    shared = set.intersection(*({k for k, v in line.items() if v.cell.value} for line in takes))
    return [
        _averaged(one.cell, line, reference, shared, rule)
        for one, line in zip(printed, takes, strict=True)
    ]


#: Metrics that are no scores of a benchmark but stand among them.
RELATIVE = ("relative performance", "TFLOPs", "TFLOPs relative", "time", "time relative")


def _averaged(cell: Cell, line: Line, reference: Line, shared: set[tuple[str, str]], rule: Average) -> Averaged:
    def mean(places: Iterable[tuple[str, str]], measured: bool) -> float | None:
        values = [_share(line[one], reference.get(one), rule, measured) for one in places]
        known = [value for value in values if value is not None]
        return fmean(known) if known and len(known) == len(values) else None

    printed = [place for place, one in line.items() if one.cell.value]
    slack = cell.half + _slack(line, reference, printed, rule)
    return Averaged(
        cell,
        mean(printed, False) if printed else None,
        slack,
        mean(sorted(shared), False) if shared else None,
        mean(printed, True) if printed else None,
        len(shared),
    )


def _share(one: Filled, whole: Filled | None, rule: Average, measured: bool) -> float | None:
    value = one.value if measured else one.cell.number
    if rule.rule == "mean" or value is None:
        return value
    if whole is None:
        return None
    unit = whole.value if measured else whole.cell.number
    return 100 * value / unit if unit else None


def _slack(line: Line, reference: Line, places: Sequence[tuple[str, str]], rule: Average) -> float:
    """Return by how much rounding of the printed cells may move their average, at most."""
    if not places:
        return 0.0
    if rule.rule == "mean":
        return fmean(line[place].cell.half for place in places)
    lost = []
    for place in places:
        one, whole = line[place].cell, reference.get(place)
        if whole is None or not whole.cell.number or one.number is None:
            continue
        share = one.number / whole.cell.number
        lost.append(100 * (one.half + share * whole.cell.half) / whole.cell.number)
    return fmean(lost) if lost else 0.0


def _grouped(filled: Iterable[Filled], keys: Sequence[str]) -> dict[tuple[str, ...], list[Filled]]:
    found: dict[tuple[str, ...], list[Filled]] = defaultdict(list)
    for one in filled:
        found[tuple(getattr(one.cell, key) for key in keys)].append(one)
    return found
