"""Rows and scores of a store for others: answers to SQL, and two Parquet files small enough to be tracked in git.

`rows.parquet` has for each run `run_key`, `committed` (seconds since 1970) and `row`, the JSON of `row.json`.
`samples.parquet` has for each run, sample and metric `run_key`, `task`, `doc_id`, `metric`, `score` (the sample's
contribution) and `unit` (the first document of its unit of statistics). Answers, media and records are not included.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import duckdb
from duckdb import DuckDBPyConnection as Connection
from duckdb import DuckDBPyRelation

from espalier.harness.errors import FOREIGN, UserError, first_words, foreign, tell_once
from espalier.harness.store.files import durable
from espalier.harness.store.files.digests import read_bytes, refuse_constant
from espalier.harness.store.files.folder_checks import check_file, check_folder
from espalier.harness.store.index import (
    TABLES,
    OpenIndex,
    Row,
    add_rows,
    add_samples,
    open_index,
    quoted,
)
from espalier.harness.store.row_shape import check_shape
from espalier.harness.store.schema import upgraded

ROWS, SAMPLES = "rows.parquet", "samples.parquet"

#: Columns of the two files.
COLUMNS: Mapping[str, Mapping[str, str]] = {
    ROWS: {"run_key": "varchar", "committed": "double", "row": "varchar"},
    SAMPLES: {
        **{"run_key": "varchar", "task": "varchar", "doc_id": "bigint", "metric": "varchar"},
        **{"score": "double", "unit": "bigint"},
    },
}

#: Content of the two files: runs with a journal that could be read.
QUERIES = {
    SAMPLES: """
        select samples.* from samples join rows using (run_key)
        order by rows.committed, run_key, samples.rowid
    """,
    ROWS: """
        select run_key, committed, row from rows semi join journals using (run_key)
        order by committed, run_key
    """,
}

#: Endings of files that take the answer to a query.
ENDINGS = (".csv", ".json", ".parquet")

#: Level 19 makes the files a tenth smaller, and takes twenty times as long.
FORMAT = "(format parquet, compression zstd, compression_level 9)"

JournalEntry = Mapping[str, Any]


def is_table(folder: Path) -> bool:
    """Return whether a folder holds rows as tables."""
    return (folder / ROWS).is_file()


def read_scores(folder: Path, keys: Iterable[str]) -> dict[str, Sequence[JournalEntry]]:
    """Return the scores of runs, as entries of their journals.

    Args:
        folder: the tables.
        keys: of all runs in `rows.parquet`.

    Raises:
        UserError: as `dated_rows`, or scores are of another run.
    """
    entries: dict[str, dict[tuple[str, int], dict[str, Any]]] = {key: {} for key in keys}
    for key, task, doc_id, metric, score, unit in _read(folder / SAMPLES):
        if key not in entries:
            raise UserError(
                f"{folder / SAMPLES}: run {key} is not in {ROWS}; valid: files written together"
            )
        entry = entries[key].setdefault(
            (task, doc_id), {"task": task, "doc_id": doc_id, "scores": {}, "units": {}}
        )
        entry["scores"][metric] = score
        if unit != doc_id:
            entry["units"][metric] = unit
    return {key: list(samples.values()) for key, samples in entries.items()}


def dated_rows(folder: Path) -> list[tuple[float, Row]]:
    """Return when each row was committed, in seconds, and the row, oldest first.

    Raises:
        UserError: a file is missing, damaged or of other columns, a row is of another version, or a run occurs twice.
    """
    lines = sorted(_read(folder / ROWS), key=lambda line: line[1])
    duplicates = [key for key, count in Counter(key for key, *_ in lines).items() if count > 1]
    if duplicates:
        raise UserError(
            f"{folder / ROWS}: run {duplicates[0]} is there twice; valid: each run once"
        )
    rows: list[tuple[float, Row]] = []
    for key, committed, text in lines:
        try:
            row = upgraded(json.loads(text, parse_constant=refuse_constant))
            check_shape(row)
            rows.append((committed, row))
        except FOREIGN as error:
            raise UserError(f"{folder / ROWS}: run {key} has {first_words(error)}") from error
    return rows


def _read(path: Path) -> list[tuple[Any, ...]]:
    if not path.is_file():
        raise UserError(f"{path} is missing; valid: {ROWS} and {SAMPLES}, written together")
    columns = COLUMNS[path.name]
    with (
        foreign(f"{path} is damaged", "a whole file", (duckdb.Error,)),
        closing(duckdb.connect()) as connection,
    ):
        table = connection.read_parquet(escape(str(path)))
        if table.columns != list(columns):
            raise UserError(
                f"{path} has columns {', '.join(table.columns)}; valid: {', '.join(columns)}"
            )
        types = ", ".join(f"{name}::{kind}" for name, kind in columns.items())
        return table.project(types).fetchall()


class ExportResult(NamedTuple):
    """The result of an export: rows and bytes of the tables, and the number of runs that were read."""

    rows: int
    size: int
    read: int


def write_tables(store: Path, folder: Path) -> ExportResult:
    """Write the finished runs of a store as tables; files of the same content are left alone.

    Damaged lines of a journal are reported when it is read, not again while it is unchanged.

    Raises:
        UserError: the store has no finished run.
        StoreLost: the disk is full or cannot be written.
    """
    check_folder("export", folder)
    with _reported(store, samples=True) as index, TemporaryDirectory() as temporary:
        size, (count,) = 0, _first(index.connection, f"select count(*) from ({QUERIES[ROWS]})")
        if not count:
            raise UserError(
                f"store={str(store)!r} holds no finished runs; valid: a store with rows"
            )
        folder.mkdir(parents=True, exist_ok=True)
        # Each file appears at once. A reader between the two finds scores of runs without a row and reports that.
        for name, query in QUERIES.items():
            file = Path(temporary, name)
            index.connection.execute(f"copy ({query}) to {quoted(file)} {FORMAT}")
            content, former = file.read_bytes(), None
            with suppress(*FOREIGN):
                former = read_bytes(folder / name)
            if content != former:
                durable.replace(folder / name, content)
            size += len(content)
        return ExportResult(count, size, index.read)


@contextmanager
def _reported(store: Path, samples: bool) -> Iterator[OpenIndex]:
    """Yield the index of a store, and report the rows that are not in it."""
    with open_index(store, samples=samples) as index:
        for problem in index.problems:
            tell_once(f"passed over: {problem}")
        yield index


def _first(connection: Connection, query: str) -> tuple[Any, ...]:
    return connection.execute(query).fetchone() or ()


def answer(folder: Path, query: str) -> list[tuple[Any, ...]]:
    """Return the answer to a query of a store or a folder of tables: the names of its columns, and its lines.

    Raises:
        UserError: the query is refused, or a table is damaged.
    """
    with _answered(folder, query) as (_, relation):
        return [tuple(relation.columns), *relation.fetchall()]


def write_answer(folder: Path, query: str, file: Path) -> int:
    """Write the answer to a query into a file, by its ending; return the number of lines.

    Raises:
        UserError: as `answer`, or the file is refused.
    """
    check_file("--out", file)
    if file.suffix not in ENDINGS:
        raise UserError(f"--out={str(file)!r} must end in one of {', '.join(ENDINGS)}")
    file.parent.mkdir(parents=True, exist_ok=True)
    with _answered(folder, query) as (connection, relation):
        relation.create_view("answer")
        (count,) = _first(connection, f"copy answer to {quoted(file)}")
        return int(count)


@contextmanager
def _answered(folder: Path, query: str) -> Iterator[tuple[Connection, DuckDBPyRelation]]:
    with _opened(folder, query) as connection:
        try:
            relation = connection.sql(query)
            if relation is None:
                raise UserError(f"sql={query!r} gives no table; valid: select ... from results")
            yield connection, relation
        except duckdb.Error as error:
            reason = str(error).partition("\n\n")[0]
            raise UserError(
                f"sql={query!r}: {' '.join(reason.split())}; valid: tables results, samples"
            ) from error


@contextmanager
def _opened(folder: Path, query: str) -> Iterator[Connection]:
    """Yield a connection with the tables `results`, and `samples` if the query names it."""
    samples = re.search(r"\bsamples\b", query, re.IGNORECASE) is not None
    if not is_table(folder):
        with _reported(folder, samples) as index:
            yield index.connection
        return
    with closing(duckdb.connect()) as connection:
        connection.execute(TABLES)
        lines = [
            (row["run_key"], time, 0, 0, 0, json.dumps(row)) for time, row in dated_rows(folder)
        ]
        add_rows(connection, lines)
        if samples:
            add_samples(connection, _read(folder / SAMPLES))
        yield connection
