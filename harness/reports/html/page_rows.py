"""Rows of stores that may stand on one page, and those that are left out, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from espalier.harness.errors import UserError
from espalier.harness.reports.curves.stored_rows import StoredResult
from espalier.harness.specs.comparable import CELL, Row, identity, name
from espalier.harness.store import RunDir, Unreadable
from espalier.harness.store.files.digests import digest
from espalier.harness.store.parquet_tables import is_table, read_tables


@dataclass
class Gathered:
    """Rows, the oldest first; what was left out and what must be known of the rest, each with its cases by reason."""

    rows: list[StoredResult] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, case: str) -> None:
        """Note what is left out."""
        self.left_out.setdefault(reason, []).append(case)


def gather(stores: Sequence[Path], positions: str) -> Gathered:
    """Return the rows of run stores and folders of tables that may stand beside each other.

    Args:
        stores: folders; of a run that stands in several of them, the row that was written last counts.
        positions: the position policy of the rows.

    Raises:
        UserError: a table is damaged, or no row is left.

    Cost: every row is in memory; scores of samples are read later.
    """
    found = Gathered()
    dated = [one for store in stores for one in _read(store, found)]
    dated.sort(key=lambda one: (one[0], one[1].row["run_key"]))
    rows = [one for _, one in dated]
    rows = _newest(rows, lambda row: row["run_key"], "a run stands in several stores", found)
    rows = _telling(rows, found)
    rows = _under(rows, positions, found)
    rows = _of_most_samples(rows, found)
    found.rows = _newest(
        rows,
        lambda row: (*identity(row), digest(row["settings"])),
        "the cell was run twice, by other code; the newer row counts",
        found,
    )
    if not found.rows:
        named = ", ".join(map(str, stores))
        raise UserError(f"--store {named} holds no rows for a report; valid: results/demo")
    _commits(found)
    return found


def case_of(row: Row) -> str:
    """Return a row in a few words."""
    return (
        f"{row['run_key']}: {name(row)} at {row['ratio']:g}, {row['model']} on {row['benchmark']}"
    )


def _read(store: Path, found: Gathered) -> Iterable[tuple[float, StoredResult]]:
    if is_table(store):
        for number, (row, told) in enumerate(read_tables(store)):
            yield float(number), StoredResult(store / row["run_key"], row, told)
        return
    for folder in sorted(one for one in (store / "runs").glob("*") if one.is_dir()):
        run = RunDir(folder)
        try:
            own = run.row()
        except Unreadable as error:
            found.drop("the file is damaged, or of another version", str(error).partition(";")[0])
            continue
        lacking = [key for key in (*CELL, "metrics") if key not in (own or {})]
        if own is None:
            found.drop("the run is not finished", folder.name)
        elif lacking:
            found.drop("the row is not whole", f"{folder.name} lacks {', '.join(lacking)}")
        else:
            yield run.committed, StoredResult(folder, own)


def _newest(
    rows: Sequence[StoredResult], key: Callable[[Row], Hashable], reason: str, found: Gathered
) -> list[StoredResult]:
    newest = {key(one.row): one for one in rows}
    kept = {id(one) for one in newest.values()}
    for one in rows:
        if id(one) not in kept:
            found.drop(reason, case_of(one.row))
    return [one for one in rows if id(one) in kept]


def _telling(rows: Sequence[StoredResult], found: Gathered) -> list[StoredResult]:
    for one in rows:
        if "settings" not in one.row:
            found.drop("the row is of an older version and tells no settings", case_of(one.row))
    return [one for one in rows if "settings" in one.row]


def _under(rows: Sequence[StoredResult], positions: str, found: Gathered) -> list[StoredResult]:
    """Return the rows under a position policy, and those that it does not concern."""
    kept = []
    for one in rows:
        own = one.row["settings"]["engine"].get("positions")
        if own in (None, positions):
            kept.append(one)
        else:
            reason = f"another position policy than {positions}"
            found.drop(reason, f"{case_of(one.row)}, {own}")
    return kept


def _of_most_samples(rows: Sequence[StoredResult], found: Gathered) -> list[StoredResult]:
    """Return, of each model and benchmark, the rows with the most samples: only these can be paired."""

    def group(row: Row) -> tuple[str, str]:
        return row["model"], row["benchmark"]

    most: dict[tuple[str, str], int] = {}
    for one in rows:
        most[group(one.row)] = max(most.get(group(one.row), 0), one.row["n_samples"])
    kept = []
    for one in rows:
        samples, wanted = one.row["n_samples"], most[group(one.row)]
        if samples == wanted:
            kept.append(one)
        else:
            found.drop(
                "another number of samples", f"{case_of(one.row)}, {samples} and not {wanted}"
            )
    return kept


def _commits(found: Gathered) -> None:
    """Note rows of several versions of the code: they stand beside each other, and a reader should know."""
    commits = Counter(
        str(one.row["extra"].get("environment", {}).get("commit")) for one in found.rows
    )
    if len(commits) > 1:
        cases = [f"{commit}: {count} rows" for commit, count in commits.most_common()]
        found.notes["rows of several versions of the code stand beside each other"] = cases
