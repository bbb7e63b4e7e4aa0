"""A printed cell of a published table: its keys, its unit, and how its number is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from espalier.harness.errors import UserError

#: Columns that identify a cell.
KEYS = ("paper", "table", "model", "method", "budget", "benchmark", "split", "metric")
COLUMNS = (*KEYS, "value", "unit")

#: All units, with the largest difference between a measured and a printed number that counts as near; None: a time, a
#: rate or a size, which another machine does not reproduce.
UNITS: Mapping[str, float | None] = {
    "%": 0.5,
    "score": 10.0,
    "F1": 0.5,
    "% of vanilla": 0.5,
    "% of baseline": 0.5,
    "CIDEr (x1)": 0.005,
    "CIDEr (x100)": 0.5,
    "score 0-100": 0.5,
    "score 0-3": 0.02,
    "fraction": 0.005,
    "edit distance": 0.005,
    "tokens": 0.5,
    "T": 0.05,
    "TFLOPs": 0.5,
    "GFLOPs": 0.5,
    "x": None,
    "ratio": None,
    "ms": None,
    "ms/sample": None,
    "ms/token": None,
    "s": None,
    "MB": None,
    "GB": None,
    "token/s": None,
}


#: The same for metrics that are judged more closely than their unit.
METRICS: Mapping[str, float] = {
    # The steps of a paper's ablation are 0.2 to 0.5.
    "mean accepted length M": 0.05,
}


@dataclass(frozen=True)
class PrintedCell:
    """A printed cell; `value` is as printed, with trailing zeros, and empty if the paper prints none."""

    paper: str
    table: str
    model: str
    method: str
    budget: str
    benchmark: str
    split: str
    metric: str
    value: str
    unit: str

    @property
    def key(self) -> tuple[str, ...]:
        """The values of `KEYS`, unique for each cell."""
        return tuple(getattr(self, name) for name in KEYS)

    @property
    def name(self) -> str:
        """The cell in words."""
        return f"{self.paper} {self.table}: {', '.join(filter(None, self.key[2:]))}"

    @cached_property
    def number(self) -> float:
        """The printed value as a number; check `value` first.

        Raises:
            UserError: no value is printed.
        """
        if not self.value:
            raise UserError(f"{self.name}: no number is printed")
        return float(self.value)

    @property
    def allowed(self) -> float | None:
        """The largest difference that counts as near; None: nothing on another machine does."""
        return METRICS.get(self.metric, UNITS[self.unit])

    @property
    def column(self) -> str:
        """The column of a budget: `50%` for `50% visual KV`; of a row printed for each column, that of its split."""
        is_column = self.split.startswith("column ")
        return self.split.removeprefix("column ") if is_column else self.budget.partition(" ")[0]

    @property
    def half(self) -> float:
        """Half a unit of the last printed digit: the rounding error."""
        return 0.5 * 10.0**-self.digits

    @property
    def digits(self) -> int:
        """Printed digits after the decimal point."""
        return len(self.value.partition(".")[2])


def place(cell: PrintedCell) -> str:
    """Return the name of a cell's benchmark in the paper's file: with its split, where the file lists that."""
    return f"{cell.benchmark} {cell.split}".strip()
