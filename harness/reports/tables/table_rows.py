"""Rows of stores for tables: of each only what a table asks, so that a hundred thousand fit; what is wrong is named."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from espalier.harness.config.group_lists import read_choice
from espalier.harness.reports.tables.cell_settings import told_of
from espalier.harness.store.parquet_tables import dated_rows, is_table
from espalier.harness.store.row_blocks import block_at, remembered
from espalier.harness.store.row_reader import walk
from espalier.harness.store.unparsed_mark import is_marked

#: What names the cell that a row fills.
CELL = ("model", "benchmark", "method", "variant", "ratio", "budget_rule")

#: What tables ask of rows: by model and benchmark the numbers, as dotted paths.
Asked = Mapping[tuple[str, str], frozenset[str]]

#: Blocks of a row that every table asks for.
BLOCKS = (
    *("run_key", *CELL),
    "n_samples",
    "seed",
    "settings",
    "extra.environment",
    "extra.unparsed",
)

#: How many notes of one kind are told in full.
TOLD = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """What a table needs of one row.

    Attributes:
        key: the run's.
        cell: model, benchmark, method, variant, ratio, rule.
        samples: how many were scored.
        whole: whether these are all of the benchmark.
        positions: the position policy; None where it does not concern the method.
        code: commit and the versions of the packages that matter.
        committed: when, in seconds.
        settings: by dotted key, as harness/reports/tables/cell_settings.py compares them.
        numbers: by dotted path.
        unread: whether too many answers could not be read.
    """

    key: str
    cell: tuple[Any, ...]
    samples: int
    whole: bool
    positions: str | None
    code: str
    committed: float
    seed: int
    settings: Mapping[str, Any]
    numbers: Mapping[str, float]
    unread: bool = False


@dataclass
class Notes:
    """What is said of rows that do not count, by kind."""

    found: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, kind: str, text: str) -> None:
        """Note a row."""
        self.found[kind].append(text)

    def lines(self) -> list[str]:
        """Return a line for each kind: how many, and the first few."""
        told = []
        for kind, texts in self.found.items():
            unique = list(dict.fromkeys(texts))
            more = f" and {len(unique) - TOLD} more" if len(unique) > TOLD else ""
            told.append(f"{len(unique)} {kind}: {'; '.join(unique[:TOLD])}{more}")
        return told


def read_rows(stores: Sequence[Path], asked: Asked, notes: Notes) -> list[Measured]:
    """Return the rows of stores that are of asked models and benchmarks, the oldest first.

    Args:
        stores: folders of run stores, or of tables (harness/store/parquet_tables.py).
        asked: by model and benchmark the numbers that tables ask for.
        notes: gets rows that cannot be read, and those of one key in several stores that differ.

    Raises:
        UserError: the tables of a folder are damaged.

    Cost: about 50 us a row.
    """
    found: dict[str, Measured] = {}
    shared: dict[str, Mapping[str, Any]] = {}

    def settled(given: Mapping[str, Any]) -> _Told:
        """Return what settings tell; equal ones of the rows are one object."""
        told = _told(given)
        text = json.dumps(told.settings, default=str)
        return replace(told, settings=shared.setdefault(text, told.settings))

    told, code = remembered(settled), remembered(_code)
    for store in stores:
        for committed, row in _rows(store, asked, notes):
            numbers = asked.get((row["model"], row["benchmark"]))
            if numbers is None:
                continue
            problem = _problem(row)
            if problem:
                notes.add(problem, row["run_key"])
                continue
            environment = row["extra"].get("environment", {})
            one = _measured(row, committed, numbers, told(row["settings"]), code(environment))
            other = found.get(one.key)
            if other is not None and other.numbers != one.numbers:
                notes.add(
                    "keys stand in several stores with different numbers (the newest counts)",
                    one.key,
                )
            if other is None or other.committed <= one.committed:
                found[one.key] = one
    return sorted(found.values(), key=lambda one: (one.committed, one.key))


def choose(
    rows: Iterable[Measured], positions: str, limit: int | None, notes: Notes
) -> list[Measured]:
    """Return the rows that may stand in one table, and note the others.

    Args:
        rows: the oldest first.
        positions: the position policy that counts.
        limit: samples that count; None: of each model and benchmark all samples, or else the most.
        notes: gets what is left out.
    """
    fitting = []
    for row in rows:
        if row.positions in (None, positions):
            fitting.append(row)
        else:
            notes.add(
                f"rows under another position policy than {positions}", f"{row.key} {row.positions}"
            )
    counts: dict[tuple[Any, ...], int] = {}
    for row in fitting:
        if limit is None:
            counts[row.cell[:2]] = max(counts.get(row.cell[:2], 0), row.samples)
        else:
            counts[row.cell[:2]] = limit
    chosen = []
    for row in fitting:
        # A batch of composed prompts is as many samples as it was asked to be.
        composed = row.settings.get("benchmark.prompt_tokens") is not None
        if composed or row.samples == counts[row.cell[:2]]:
            chosen.append(row)
        else:
            text = f"{row.key} {row.samples} of {row.cell[1]}, not {counts[row.cell[:2]]}"
            notes.add("rows of another number of samples", text)
    return chosen


def usual_positions() -> str:
    """Return the position policy that is the engine's default."""
    return str(read_choice("engine", "default")["positions"])


def _rows(store: Path, asked: Asked, notes: Notes) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """Yield when each row was committed, and what tables ask of it."""
    if is_table(store):
        yield from dated_rows(store)
        return
    numbers = {block_at(path) for paths in asked.values() for path in paths}
    begun = 0
    for run in walk(store, sorted({*BLOCKS, *numbers})):
        if run.problem is not None:
            notes.add("rows cannot be read", str(run.problem).partition(";")[0])
        elif run.row is not None:
            yield run.committed, run.row
        else:
            begun += 1
    if begun:
        notes.add("stores have runs that are not finished", f"{store} {begun}")


def _problem(row: Mapping[str, Any]) -> str:
    """Return why a row cannot count in a table, as a kind of note; empty if it can."""
    if not isinstance(row.get("settings"), Mapping):
        return "rows of an older version do not tell their settings"
    return ""


@dataclass(frozen=True, slots=True)
class _Told:
    """What a table needs of the settings of a row, which many rows share."""

    whole: bool
    positions: str | None
    settings: Mapping[str, Any]


def _told(given: Mapping[str, Any]) -> _Told:
    whole = given["benchmark"].get("limit") is None
    return _Told(whole, given["engine"].get("positions"), told_of(given))


def _code(environment: Mapping[str, Any]) -> str:
    names = ("commit", "torch", "transformers", "lmms_eval")
    return " ".join(str(environment.get(name)) for name in names)


def _measured(
    row: Mapping[str, Any], committed: float, asked: frozenset[str], told: _Told, code: str
) -> Measured:
    """Return what a table needs of a row."""
    return Measured(
        key=row["run_key"],
        cell=tuple(round(row[name], 6) if name == "ratio" else row.get(name) for name in CELL),
        samples=row["n_samples"],
        whole=told.whole,
        positions=told.positions,
        code=code,
        committed=committed,
        seed=row.get("seed", 0),
        settings=told.settings,
        numbers={path: value for path in asked if (value := _number(row, path)) is not None},
        unread=is_marked(row),
    )


def _number(row: Mapping[str, Any], path: str) -> float | None:
    """Return the number at a dotted path; None where the row has none."""
    found: Any = row
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None
