"""Select the results of one page, and record the excluded ones by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from espalier.harness.errors import UserError
from espalier.harness.paths import DEMO, short_path
from espalier.harness.reports.curves.stored_rows import StoredResult
from espalier.harness.specs.comparable import CELL, Row, amount, identity, name, settings_digest
from espalier.harness.store.parquet_tables import is_table, read_tables
from espalier.harness.store.row_blocks import memoized
from espalier.harness.store.row_reader import Walk, walk

#: Blocks of a row that the page shows or compares.
BLOCKS = (
    *("run_key", *CELL, "keep", "metrics", "settings", "time", "flops", "memory"),
    *("extra.headline", "extra.higher_is_better", "extra.aggregation", "extra.unparsed"),
    *("extra.label", "extra.params", "extra.sites", "extra.environment"),
    *("extra.speculative", "extra.cache", "extra.diffusion"),
    *("extra.discriminates", "extra.first_token", "extra.code", "extra.plugins"),
)

#: Returns the place of the user's class that a row names for a method, None for a name of conf/; raises UserError for
#: code that is not the row's.
CodeOf = Callable[[Row, str], str | None]


@dataclass
class PageResults:
    """Results, oldest first; excluded cases and notes by reason."""

    rows: list[StoredResult] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, case: str) -> None:
        """Record an excluded case."""
        self.left_out.setdefault(reason, []).append(case)


def gather(stores: Sequence[Path], positions: str, read: Walk = walk) -> PageResults:
    """Return the comparable results of run stores and folders of tables.

    Args:
        stores: folders; of a run that is in several, the row written last is used.
        positions: the position policy of the results.
        read: reads run stores; its rows have at least `BLOCKS`.

    Raises:
        UserError: a table is damaged, or no result remains.

    Cost: about 30 us for each result of a store with an index; scores of samples are read later.
    """
    results = PageResults()
    dated = [pair for store in stores for pair in _read(store, results, read)]
    dated.sort(key=lambda pair: (pair[0], pair[1].row["run_key"]))
    selected = [result for _, result in dated]
    selected = _newest(
        selected, lambda row: row["run_key"], "the run is in several stores", results
    )
    selected = _with_settings(selected, results)
    selected = _with_policy(selected, positions, results)
    selected = _with_most_samples(selected, results)
    digested = memoized(settings_digest)
    results.rows = _newest(
        selected,
        lambda row: (*identity(row), digested(row["settings"])),
        "the cell was run twice, by other code; the newer row counts",
        results,
    )
    if not results.rows:
        names = ", ".join(map(str, stores))
        raise UserError(f"--store {names} holds no rows for a report; valid: {short_path(DEMO)}")
    _commits(results)
    return results


def case_of(row: Row) -> str:
    """Return a short description of a row."""
    return f"{row['run_key']}: {name(row)} at {amount(row)}, {row['model']} on {row['benchmark']}"


def _read(store: Path, results: PageResults, read: Walk) -> Iterable[tuple[float, StoredResult]]:
    if is_table(store):
        for number, (row, entries) in enumerate(read_tables(store)):
            yield float(number), StoredResult(store / row["run_key"], row, entries)
        return
    for run in read(store, BLOCKS):
        missing = [key for key in (*CELL, "metrics") if key not in (run.row or {})]
        if run.problem is not None:
            reason = "the file is damaged, or of another version"
            results.drop(reason, str(run.problem).partition(";")[0])
        elif run.row is None:
            results.drop("the run is not finished", run.path.name)
        elif missing:
            results.drop("the row is incomplete", f"{run.path.name} lacks {', '.join(missing)}")
        else:
            yield run.committed, StoredResult(run.path, run.row)


def _newest(
    rows: Sequence[StoredResult], key: Callable[[Row], Hashable], reason: str, results: PageResults
) -> list[StoredResult]:
    newest = {key(result.row): result for result in rows}
    kept = {id(result) for result in newest.values()}
    for result in rows:
        if id(result) not in kept:
            results.drop(reason, case_of(result.row))
    return [result for result in rows if id(result) in kept]


def _with_settings(rows: Sequence[StoredResult], results: PageResults) -> list[StoredResult]:
    for result in rows:
        if "settings" not in result.row:
            results.drop("the row is of an older version without settings", case_of(result.row))
    return [result for result in rows if "settings" in result.row]


def _with_policy(
    rows: Sequence[StoredResult], positions: str, results: PageResults
) -> list[StoredResult]:
    """Return the results with a position policy, and those to which it does not apply."""
    kept = []
    for result in rows:
        policy = result.row["settings"]["engine"].get("positions")
        if policy in (None, positions):
            kept.append(result)
        else:
            reason = f"another position policy than {positions}"
            results.drop(reason, f"{case_of(result.row)}, {policy}")
    return kept


def _with_most_samples(rows: Sequence[StoredResult], results: PageResults) -> list[StoredResult]:
    """Return, for each model and benchmark, the results with the most samples: only these can be paired."""

    def group(row: Row) -> tuple[str, str]:
        return row["model"], row["benchmark"]

    largest: dict[tuple[str, str], int] = {}
    for result in rows:
        largest[group(result.row)] = max(largest.get(group(result.row), 0), result.row["n_samples"])
    kept = []
    for result in rows:
        samples, required = result.row["n_samples"], largest[group(result.row)]
        if samples == required:
            kept.append(result)
        else:
            results.drop(
                "another number of samples", f"{case_of(result.row)}, {samples} and not {required}"
            )
    return kept


def _commits(results: PageResults) -> None:
    """Note that results are of several versions of the code."""
    commits = Counter(
        str(result.row["extra"].get("environment", {}).get("commit")) for result in results.rows
    )
    if len(commits) > 1:
        cases = [f"{commit}: {count} rows" for commit, count in commits.most_common()]
        results.notes["rows of several code versions are compared"] = cases
