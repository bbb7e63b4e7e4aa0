"""Shared by the benchmark parts: figures, the model, real inputs, and paired timing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from statistics import median, quantiles
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from espalier.harness.config.build_spec import specs_of
from espalier.harness.engine.artifacts import with_scheme
from espalier.harness.errors import UserError
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.seedling.scene_questions import questions_for
from espalier.harness.seedling.scenes import Scenes
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.tools.calibration.calibration_images import question
from espalier.methods.base import TokenReducer
from lab.bench.bench_page import verdict

if TYPE_CHECKING:
    from torch import Tensor

    from espalier.harness.models.adapter import Adapter


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        part: the part of the benchmark it comes from.
        name: what was measured.
        value: the number, a median where there are repeats.
        unit: `x` for ratios, otherwise a unit of time or size.
        quartiles: first and third quartile over the repeats.
        at_most: the target, if it is an upper one.
        at_least: the target, if it is a lower one.
        interval: 95 % interval, where there is one instead of quartiles.
        at_best: theoretical bound; measurements above it are not believable.
    """

    part: str
    name: str
    value: float
    unit: str
    quartiles: tuple[float, float] | None = None
    at_most: float | None = None
    at_least: float | None = None
    interval: tuple[float, float] | None = None
    at_best: float | None = None

    @property
    def believable(self) -> bool:
        """Whether part of the spread, or the value if there is none, lies within the bound."""
        low = min((self.value, *(self.spread or ())))
        return self.at_best is None or low <= self.at_best

    @property
    def spread(self) -> tuple[float, float] | None:
        """The interval, or the quartiles."""
        return self.interval or self.quartiles

    @property
    def verdict(self) -> str:
        """`met`, `missed`, `not believable` or empty."""
        if not self.believable:
            return "not believable"
        return verdict(self.met)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one. Figures that are not believable never meet it."""
        if not self.believable:
            return False
        if self.at_most is not None:
            return self.value <= self.at_most
        if self.at_least is not None:
            return self.value >= self.at_least
        return None

    @property
    def target(self) -> str:
        """The target in signs; empty without one."""
        if self.at_most is not None:
            return f"<= {self.at_most:g}"
        return "" if self.at_least is None else f">= {self.at_least:g}"

    def entry(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {**asdict(self), "met": self.met, "verdict": self.verdict}

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> Figure:
        """Rebuild from the JSON form."""
        stated = {part.name: entry[part.name] for part in fields(cls)}
        spreads = {
            name: None if stated[name] is None else tuple(stated[name])
            for name in ("quartiles", "interval")
        }
        return cls(**{**stated, **spreads})


def table_lines(figures: Sequence[Figure]) -> list[str]:
    """Return a table in Markdown, one line for each figure."""
    lines = ["| part | measured | value | target | |", "| --- | --- | ---: | --- | --- |"]
    for figure in figures:
        spread = "" if figure.spread is None else " [{:.3g}, {:.3g}]".format(*figure.spread)
        value = f"{figure.value:.4g} {figure.unit}{spread}"
        cells = (figure.part, figure.name, value, figure.target, figure.verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def spec_of(*overrides: str) -> RunSpec:
    """Return the run of a command line."""
    return specs_of(*overrides)[0]


def figures_of(result: Mapping[str, Any]) -> list[Figure]:
    """Return the figures in the JSON form of a benchmark's result."""
    return [Figure.from_entry(entry) for entry in result["figures"]]


def print_table(figures: Sequence[Figure]) -> None:
    """Print one line for each figure: value, interval or quartiles, target and verdict."""
    table = Table()
    for title in ("part", "measured", "value", "spread", "target", ""):
        table.add_column(title, justify="right" if title in ("value", "spread") else "left")
    for figure in figures:
        spread = "" if figure.spread is None else "{:.3g} .. {:.3g}".format(*figure.spread)
        value = f"{figure.value:.4g} {figure.unit}"
        table.add_row(figure.part, figure.name, value, spread, figure.target, figure.verdict)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


@dataclass(frozen=True)
class Setup:
    """One bench run: its model, thoroughness, and objects that are loaded at most once."""

    model: str = "seedling"
    quick: bool = False
    overrides: tuple[str, ...] = field(default=())

    def repeats(self, full: int, quick: int) -> int:
        """Return how often to repeat a measurement."""
        return quick if self.quick else full

    def spec(self, *overrides: str) -> RunSpec:
        """Return the run that these overrides of the config describe, on the benchmarked model."""
        return spec_of(f"model={self.model}", *self.overrides, *overrides)

    @cached_property
    def adapter(self) -> Adapter:
        """The model, loaded on first use."""
        logging.disable_progress_bar()
        return load_adapter(self.spec().model)

    def inputs(self, rows: int) -> dict[str, Tensor]:
        """Return one encoded batch of held-out scenes, each with a question about an object."""
        scenes = Scenes()
        drawn = [scenes.scene("test", 0, index) for index in range(rows)]
        return self.adapter.encode(
            [question(scene.to_pil(), questions_for(scene, {"attr": 1})[0].text) for scene in drawn]
        )


def reducer(spec: RunSpec) -> TokenReducer:
    """Return the method of a run, which must be a token reducer.

    Raises:
        UserError: it is another kind of method.
    """
    method = build_method(spec.method.name, spec.method.params)
    if not isinstance(method, TokenReducer) or not method.in_one_prefill:
        raise UserError(f"method={spec.method.name!r} is not a token reducer")
    return with_scheme(spec.model, method, spec.method.name, store=spec.store)


@dataclass(frozen=True)
class TimedPair:
    """Times of two procedures measured in turns, in seconds, and their ratio pair by pair."""

    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """First over second, one for each turn."""
        return tuple(a / b for a, b in zip(self.first, self.second, strict=True))

    def figure(self, part: str, name: str, at_most: float | None = None) -> Figure:
        """Return the median ratio with its quartiles."""
        low, _, high = quantiles(self.ratios, n=4, method="inclusive")
        return Figure(part, name, median(self.ratios), "x", (low, high), at_most)


def paired(
    first: Callable[[], object],
    second: Callable[[], object],
    repeats: int,
    calls: int = 1,
    clock: Callable[[], float] = perf_counter,
) -> TimedPair:
    """Time two procedures in turns, the order changing each time, after one untimed call of each.

    Machine load and clock speeds drift; two consecutive calls drift
    together, so the ratio of a pair is far steadier than the ratio of two medians.
    """
    first(), second()
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats):
        order: Sequence[int] = (0, 1) if turn % 2 == 0 else (1, 0)
        for side in order:
            times[side].append(_seconds((first, second)[side], calls, clock))
    return TimedPair(tuple(times[0]), tuple(times[1]))


def _seconds(procedure: Callable[[], object], calls: int, clock: Callable[[], float]) -> float:
    started = clock()
    for _ in range(calls):
        procedure()
    return (clock() - started) / calls
