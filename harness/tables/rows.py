"""Rows of stores for tables: of each only what a table asks, so that a hundred thousand fit; what is wrong is named."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.specs import EngineSpec
from harness.store import RunDir, Unreadable

#: Blocks of a row with numbers that tables print.
BLOCKS = ("time", "flops", "memory", "tokens")

EXTRA = ("speedup", "speculative", "diffusion", "latency", "acceptance")

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
        settings: of the model, the method, the draft and the benchmark, by dotted key.
        numbers: by dotted path.
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


def read_rows(
    stores: Sequence[Path], cells: Collection[tuple[str, str]], notes: Notes
) -> list[Measured]:
    """Return the rows of stores that are of asked models and benchmarks, the oldest first.

    Args:
        stores: folders of run stores.
        cells: models with benchmarks that tables ask for.
        notes: gets rows that cannot be read, and those of one key in several stores that differ.

    Cost: about 50 us a row.
    """
    found: dict[str, Measured] = {}
    wanted = frozenset(cells)
    for store in stores:
        for one in _read(store, wanted, notes):
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
        composed = row.settings["benchmark.prompt_tokens"] is not None
        if composed or row.samples == counts[row.cell[:2]]:
            chosen.append(row)
        else:
            text = f"{row.key} {row.samples} of {row.cell[1]}, not {counts[row.cell[:2]]}"
            notes.add("rows of another number of samples", text)
    return chosen


def usual_positions() -> str:
    """Return the position policy that is the engine's default."""
    return EngineSpec().positions


def _read(store: Path, wanted: frozenset[tuple[str, str]], notes: Notes) -> Iterator[Measured]:
    for path in store.glob("runs/*/row.json"):
        run = RunDir(path.parent)
        try:
            row = run.row()
        except Unreadable as error:
            notes.add("rows cannot be read", str(error).partition(";")[0])
            continue
        if row is None or (row["model"], row["benchmark"]) not in wanted:
            continue
        if "settings" not in row:
            notes.add("rows of an older version do not tell their settings", row["run_key"])
            continue
        yield _measured(row, run.committed)


def _measured(row: Mapping[str, Any], committed: float) -> Measured:
    given, extra = row["settings"], row["extra"]
    # Of the model only what tables may ask for: facts and processors are long.
    settings = {
        **{f"method.params.{key}": value for key, value in given["method"]["params"].items()},
        "method.draft": (given.get("draft") or {}).get("name"),
        "model.weights": given["model"].get("weights"),
        "model.prompt": given["model"].get("prompt"),
        "model.video.frames": (given["model"].get("video") or {}).get("frames"),
        **{
            f"benchmark.{key}": given["benchmark"].get(key)
            for key in ("prompt_tokens", "new_tokens")
        },
        **{f"engine.{key}": given["engine"].get(key) for key in ("batch_size", "rescore")},
    }
    environment = extra.get("environment", {})
    code = [str(environment.get(name)) for name in ("commit", "torch", "transformers", "lmms_eval")]
    cell = ("model", "benchmark", "method", "variant", "ratio", "budget_rule")
    return Measured(
        key=row["run_key"],
        cell=tuple(round(row[name], 6) if name == "ratio" else row.get(name) for name in cell),
        samples=row["n_samples"],
        whole=given["benchmark"].get("limit") is None,
        positions=given["engine"].get("positions"),
        code=" ".join(code),
        committed=committed,
        seed=row.get("seed", 0),
        settings=settings,
        numbers=dict(_numbers(row)),
    )


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, values in row.get("metrics", {}).items():
        for part in ("value", "stderr"):
            if values.get(part) is not None:
                yield f"metrics.{name}.{part}", values[part]
    for block in BLOCKS:
        yield from _flat(block, row.get(block))
    for block in EXTRA:
        yield from _flat(f"extra.{block}", row["extra"].get(block))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _flat(f"{prefix}.{name}", one)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield prefix, value
