"""Read results for tables, keeping only what tables need, so that 100,000 fit in memory; problems are noted."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from espalier.harness.config.group_lists import read_choice
from espalier.harness.reports.frame import at, stored_results
from espalier.harness.reports.tables.cell_settings import row_settings
from espalier.harness.store.index import EXTRA, ReadRun, Walk, memoized, walk
from espalier.harness.store.row_text import is_marked

#: Keys of the cell that a row fills, besides its ratio.
WORDS = ("model", "benchmark", "method", "variant", "budget_rule")

#: Dotted paths of the numbers that tables need, by model and benchmark.
RequestedNumbers = Mapping[tuple[str, str], frozenset[str]]

#: Blocks of a row that every table needs.
BLOCKS = (
    *("run_key", *WORDS, "ratio"),
    "n_samples",
    "seed",
    "settings",
    "extra.environment",
    "extra.unparsed",
)

#: Number of notes of one kind that are listed.
MAX_LISTED = 5


class MeasuredResult(NamedTuple):
    """What a table needs of one result.

    Attributes:
        key: the run key.
        cell: model, benchmark, method, variant, rule, ratio.
        samples: number of scored samples.
        code: commit and versions of the relevant packages.
        committed: time in seconds.
        settings: by dotted key, as compared by harness/reports/tables/cell_settings.py.
        numbers: by dotted path.
        unread: whether too many answers could not be read.
    """

    key: str
    cell: tuple[Any, ...]
    samples: int
    code: str
    committed: float
    settings: Mapping[str, Any]
    numbers: Mapping[str, float]
    unread: bool = False

    @property
    def complete(self) -> bool:
        """Whether these are all samples of the benchmark."""
        return self.settings.get("benchmark.limit") is None

    @property
    def positions(self) -> str | None:
        """The position policy; None if it does not apply to the method."""
        return self.settings.get("engine.positions")


@dataclass
class Notes:
    """Notes on results that are not used, by kind."""

    by_kind: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, kind: str, text: str) -> None:
        """Add a note on a result."""
        self.by_kind[kind].append(text)

    def lines(self) -> list[str]:
        """Return one line for each kind: the number of notes, and the first few."""
        lines = []
        for kind, texts in self.by_kind.items():
            unique = list(dict.fromkeys(texts))
            remainder = f" and {len(unique) - MAX_LISTED} more" if len(unique) > MAX_LISTED else ""
            lines.append(f"{len(unique)} {kind}: {'; '.join(unique[:MAX_LISTED])}{remainder}")
        return lines


def read_rows(
    stores: Sequence[Path], requested: RequestedNumbers, notes: Notes, read: Walk = walk
) -> list[MeasuredResult]:
    """Return the results of the requested models and benchmarks, oldest first.

    Args:
        stores: run stores, or folders of tables (harness/store/exports.py).
        requested: the numbers that tables need, by model and benchmark.
        notes: receives results that cannot be read, and results of one key that differ between stores.
        read: reads run stores; its rows have at least `BLOCKS` and those of the requested numbers.

    Raises:
        UserError: the tables of a folder are damaged.

    Cost: about 50 us for each result.
    """
    results: dict[str, MeasuredResult] = {}
    shared: dict[str, Mapping[str, Any]] = {}

    def shared_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return settings by dotted key; equal ones are one object."""
        values = row_settings(settings)
        return shared.setdefault(json.dumps(values, default=str), values)

    settings_of, code_of = memoized(shared_settings), memoized(_code)
    readers = {path: at(path) for paths in requested.values() for path in paths}
    blocks = sorted({*BLOCKS, *map(_block, readers)})
    for store in stores:
        unfinished: list[ReadRun] = []

        def skip(run: ReadRun, unfinished: list[ReadRun] = unfinished) -> None:
            """Note a damaged row, and count a run that is not finished."""
            if run.problem is None:
                unfinished.append(run)
            else:
                notes.add("rows cannot be read", str(run.problem).partition(";")[0])

        for stored in stored_results(store, blocks, skip, read, scored=False):
            row = stored.row
            key, paths = row["run_key"], requested.get((row["model"], row["benchmark"]))
            if paths is None:
                continue
            if not isinstance(row.get("settings"), dict):
                notes.add("rows of an older version have no settings", key)
                continue
            result = MeasuredResult(
                key,
                (*map(row.get, WORDS), round(row["ratio"], 6)),
                row["n_samples"],
                code_of(row["extra"].get("environment", {})),
                stored.committed,
                settings_of(row["settings"]),
                {path: value for path in paths if _is_number(value := readers[path](row))},
                is_marked(row),
            )
            known_result = results.get(key)
            if known_result is not None and known_result.numbers != result.numbers:
                kind = "keys are in several stores with different numbers (the newest counts)"
                notes.add(kind, key)
            if known_result is None or known_result.committed <= stored.committed:
                results[key] = result
        if unfinished:
            notes.add("stores have runs that are not finished", f"{store} {len(unfinished)}")
    return sorted(results.values(), key=lambda result: (result.committed, result.key))


def choose(
    rows: Iterable[MeasuredResult], positions: str, limit: int | None, notes: Notes
) -> list[MeasuredResult]:
    """Return the results that can be in one table, and note the others.

    Args:
        rows: oldest first.
        positions: the position policy to use.
        limit: number of samples to use; None: all samples of each model and benchmark, or else the largest number.
        notes: receives the results that are excluded.
    """
    fitting = []
    counts: dict[tuple[Any, ...], int] = {}
    for row in rows:
        if row.positions in (None, positions):
            fitting.append(row)
            counts[row.cell[:2]] = limit or max(counts.get(row.cell[:2], 0), row.samples)
        else:
            kind = f"rows under another position policy than {positions}"
            notes.add(kind, f"{row.key} {row.positions}")
    chosen = []
    for row in fitting:
        # A batch of composed prompts has the requested number of samples.
        composed = row.settings.get("benchmark.prompt_tokens") is not None
        if composed or row.samples == counts[row.cell[:2]]:
            chosen.append(row)
        else:
            text = f"{row.key} {row.samples} of {row.cell[1]}, not {counts[row.cell[:2]]}"
            notes.add("rows of another number of samples", text)
    return chosen


def usual_positions() -> str:
    """Return the engine's default position policy."""
    return str(read_choice("engine", "default")["positions"])


def _block(path: str) -> str:
    """Return the block that contains a dotted path of a row."""
    names = path.split(".")
    return ".".join(names[: 2 if names[0] == EXTRA else 1])


def _code(environment: Mapping[str, Any]) -> str:
    names = ("commit", "torch", "transformers", "lmms_eval")
    return " ".join(str(environment.get(name)) for name in names)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
