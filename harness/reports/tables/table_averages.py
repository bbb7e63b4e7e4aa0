"""Averages of a table by its paper's rule and by one that treats all rows alike; printed ones that do not follow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from espalier.harness.reports.tables.cell_verdicts import Filled
from espalier.harness.reports.tables.printed_cell import Cell
from espalier.harness.reports.tables.published_tables import Average

#: What a cell of a line is of: benchmark, split, metric.
Place = tuple[str, ...]

#: A line's cells by what they are of.
Line = Mapping[Place, Filled]


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
        unlike: why the measured average need not be the printed one: the reasons of the cells that it takes.
        unread: whether too many answers of what was measured could not be read.
    """

    cell: Cell
    follows: float | None
    slack: float
    consistent: float | None
    own: float | None
    shared: int
    unlike: str = ""
    unread: bool = False

    @property
    def remark(self) -> str:
        """What is wrong in print, or nothing."""
        if self.follows is None or not self.cell.value:
            return ""
        if abs(self.cell.number - self.follows) <= self.slack + 1e-9:
            return ""
        return f"printed {self.cell.value}, the printed cells give {self.follows:.{max(self.cell.digits, 2)}f}"


def averages(filled: Sequence[Filled], rule: Average | None) -> list[Averaged]:
    """Return the averages of every line of a table that prints one."""
    if rule is None:
        return []
    printed: dict[tuple[str, ...], list[Filled]] = defaultdict(list)
    for one in filled:
        if rule.prints(one.cell):
            printed[one.cell.model, one.cell.metric].append(one)
    return [one for group in printed.values() for one in _of_group(group, filled, rule)]


def with_averages(filled: Sequence[Filled], found: Iterable[Averaged]) -> list[Filled]:
    """Return the cells of a table, printed averages with what was measured of them and what is wrong in print."""
    by_key = {one.cell.key: one for one in found}
    out = []
    for one in filled:
        average = by_key.get(one.cell.key)
        if average is None:
            out.append(one)
        else:
            unread = average.own is not None and average.unread
            measured = replace(one, value=average.own, unread=unread)
            out.append(replace(measured, remark=average.remark, apart=average.unlike))
    return out


def _of_group(printed: Sequence[Filled], filled: Sequence[Filled], rule: Average) -> list[Averaged]:
    """Return the averages of one model, all of one metric."""
    first = printed[0].cell
    lines: dict[tuple[str, str], dict[tuple[str, ...], Filled]] = defaultdict(dict)
    reference: dict[tuple[str, ...], Filled] = {}
    for one in filled:
        cell = one.cell
        if cell.model != first.model or rule.prints(cell) or cell.metric in RELATIVE:
            continue
        if rule.rule == "mean" and cell.metric != first.metric:
            continue
        if rule.rule == "omnidocbench" and cell.metric not in OMNIDOCBENCH:
            continue
        where = (cell.benchmark, cell.split, cell.metric)
        lines[cell.method, cell.budget][where] = one
        if cell.method == rule.reference:
            reference.setdefault(where, one)
    takes = [lines[one.cell.method, one.cell.budget] for one in printed]
    shared = set.intersection(*({k for k, v in line.items() if v.cell.value} for line in takes))
    return [
        _averaged(one.cell, line, reference, shared, rule)
        for one, line in zip(printed, takes, strict=True)
    ]


#: What OmniDocBench's Overall is made of: by what each is multiplied, and what that is added to.
OMNIDOCBENCH = {"text_edit": (-100.0, 100.0), "formula_cdm": (1.0, 0.0), "table_teds": (1.0, 0.0)}

#: Metrics that are no scores of a benchmark but stand among them.
RELATIVE = ("relative performance", "TFLOPs", "TFLOPs relative", "time", "time relative")


def _averaged(
    cell: Cell, line: Line, reference: Line, shared: set[Place], rule: Average
) -> Averaged:
    def mean(places: Iterable[Place], measured: bool) -> float | None:
        values = [_share(line[one], reference.get(one), rule, measured) for one in places]
        known = [value for value in values if value is not None]
        return fmean(known) if known and len(known) == len(values) else None

    printed = [place for place, one in line.items() if one.cell.value]
    return Averaged(
        cell,
        mean(printed, False),
        cell.half + _slack(line, reference, printed, rule),
        mean(sorted(shared), False),
        mean(printed, True),
        len(shared),
        "; ".join(_reasons(line, reference, printed)),
        any(line[place].unread for place in printed),
    )


def _reasons(line: Line, reference: Line, places: Sequence[Place]) -> list[str]:
    """Return why the cells of an average, or those that they are divided by, need not be the printed ones."""
    found: dict[str, str] = {}
    for place in places:
        for one in (line[place], reference.get(place)):
            if one is not None and one.unlike:
                found.setdefault(one.unlike, f"with {one.cell.benchmark}: {one.unlike}")
    return list(found.values())


def _share(one: Filled, whole: Filled | None, rule: Average, measured: bool) -> float | None:
    """Return what a cell adds to an average."""
    value = _number(one, measured)
    if value is None:
        return None
    if rule.rule == "omnidocbench":
        times, plus = OMNIDOCBENCH[one.cell.metric]
        return times * value + plus
    if rule.rule == "mean":
        return value
    unit = None if whole is None else _number(whole, measured)
    return 100 * value / unit if unit else None


def _number(one: Filled, measured: bool) -> float | None:
    """Return what is measured of a cell, or what is printed; None where nothing is."""
    if measured:
        return one.value
    return one.cell.number if one.cell.value else None


def _slack(line: Line, reference: Line, places: Sequence[Place], rule: Average) -> float:
    """Return by how much rounding of the printed cells may move their average, at most."""
    lost = [0.0]
    for place in places:
        one, whole = line[place].cell, reference.get(place)
        if rule.rule == "omnidocbench":
            lost.append(one.half * abs(OMNIDOCBENCH[one.metric][0]))
        elif rule.rule == "mean":
            lost.append(one.half)
        elif whole is not None and (unit := _number(whole, False)):
            lost.append(100 * (one.half + one.number / unit * whole.cell.half) / unit)
    return sum(lost) / max(len(places), 1)
