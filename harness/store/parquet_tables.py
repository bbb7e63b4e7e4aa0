"""Rows and scores of a store as two Parquet files, small enough to be tracked in git.

`rows.parquet` has for each run `run_key`, `committed` (seconds since 1970) and `row`, the JSON of `row.json`.
`samples.parquet` has for each run, sample and metric `run_key`, `task`, `doc_id`, `metric`, `score` (the sample's
contribution) and `unit` (the first document of its unit of statistics). Answers, media and records are not included.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from espalier.harness.errors import FOREIGN, UserError, first_words, foreign
from espalier.harness.store.files.untrusted_json import refuse_constant
from espalier.harness.store.row_shape import check_shape
from espalier.harness.store.schema import upgraded

ROWS, SAMPLES = "rows.parquet", "samples.parquet"

#: Columns of the two files.
ROW_TYPES = pa.schema([("run_key", pa.string()), ("committed", pa.float64()), ("row", pa.string())])
SAMPLE_TYPES = pa.schema(
    [
        ("run_key", pa.string()),
        ("task", pa.string()),
        ("doc_id", pa.int64()),
        ("metric", pa.string()),
        ("score", pa.float64()),
        ("unit", pa.int64()),
    ]
)

Row = Mapping[str, Any]
JournalEntry = Mapping[str, Any]


def is_table(folder: Path) -> bool:
    """Return whether a folder holds rows as tables."""
    return (folder / ROWS).is_file()


def read_tables(folder: Path) -> list[tuple[Row, Sequence[JournalEntry]]]:
    """Return rows, the oldest first, each with scoring entries in the form of a journal.

    Raises:
        UserError: a file is missing, damaged or of other columns, a row is of another version, or a run occurs twice.
    """
    rows = read_rows(folder)
    entries: dict[str, dict[tuple[str, int], dict[str, Any]]] = {row["run_key"]: {} for row in rows}
    table = read_samples(folder).to_pydict()
    for key, task, doc_id, metric, score, unit in zip(*table.values(), strict=True):
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
    return [(row, list(entries[row["run_key"]].values())) for row in rows]


def read_rows(folder: Path) -> list[Row]:
    """Return the rows alone; raises UserError as `read_tables`."""
    return [row for _, row in dated_rows(folder)]


def dated_rows(folder: Path) -> list[tuple[float, Row]]:
    """Return when each row was committed, in seconds, and the row; raises UserError as `read_tables`."""
    table = _read(folder / ROWS, ROW_TYPES).sort_by("committed").to_pydict()
    keys: list[str] = table["run_key"]
    duplicates = [key for key, count in Counter(keys).items() if count > 1]
    if duplicates:
        raise UserError(
            f"{folder / ROWS}: run {duplicates[0]} is there twice; valid: each run once"
        )
    rows: list[Row] = []
    for key, text in zip(keys, table["row"], strict=True):
        try:
            row = upgraded(json.loads(text, parse_constant=refuse_constant))
            check_shape(row)
            rows.append(row)
        except FOREIGN as error:
            raise UserError(f"{folder / ROWS}: run {key} has {first_words(error)}") from error
    return list(zip(table["committed"], rows, strict=True))


def read_samples(folder: Path) -> pa.Table:
    """Return the scores of samples; raises UserError as `read_tables`."""
    return _read(folder / SAMPLES, SAMPLE_TYPES)


def _read(path: Path, types: pa.Schema) -> pa.Table:
    if not path.is_file():
        raise UserError(f"{path} is missing; valid: {ROWS} and {SAMPLES}, written together")
    with foreign(f"{path} is damaged", "a whole file", (pa.ArrowException,)):
        table = pq.read_table(path)
        if table.column_names != types.names:
            names = ", ".join(types.names)
            raise UserError(f"{path} has columns {', '.join(table.column_names)}; valid: {names}")
        return table.cast(types)
