"""Own data as records: from a file or folder (`benchmark.path`), a list of tables, or a pandas frame."""

from __future__ import annotations

import string
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from espalier.harness.errors import UserError, near_names
from espalier.harness.specs.records.data_file import RowTable, read_rows
from espalier.harness.specs.records.media_cells import (
    MediaReader,
    WrongCell,
    is_media_column,
    items,
    missing,
)
from espalier.harness.specs.records.record import (
    Mistakes,
    Record,
    RecordSettings,
    RecordTable,
    category_metric,
)
from espalier.harness.specs.records.references import ANSWERS, check_references, chosen_score
from espalier.harness.store.files.digests import Digests

if TYPE_CHECKING:
    from pandas import DataFrame

#: Columns by meaning; the first name is the one that pages use. Others are VLMEvalKit's and Hugging Face's.
QUESTION, HINT = ("question",), "hint"
CHOICES = ("choices", "options")
IDS = ("id", "index")
CATEGORY = "category"
LETTERS = string.ascii_uppercase
KNOWN = (*QUESTION, *ANSWERS, *CHOICES, *IDS, CATEGORY, HINT, "tolerance")

#: More categories than this are ids or free text.
MOST_CATEGORIES = 100


def read_records(path: Path, settings: RecordSettings) -> RecordTable:
    """Return the records of a data file or folder; a file that has not changed is read once in a process.

    Raises:
        UserError: one line with the file, the first wrong lines, the count of others and what is valid.
    """
    stamp = (path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else ()
    return _read(path, settings, stamp) if stamp else _records_of_path(path, settings)


def table_of(
    rows: Iterable[Mapping[str, Any]] | DataFrame,
    base: Path,
    settings: RecordSettings = RecordSettings(),  # noqa: B008  # frozen
    name: str = "data",
) -> RecordTable:
    """Return the records of tables in memory: a list of dictionaries, or a pandas frame.

    Args:
        rows: columns as in a data file; pictures may be PIL images, arrays of 8-bit integers, bytes or paths.
        base: folder at which relative paths start.
        settings: score, question and tolerance.
        name: of the benchmark.

    Raises:
        UserError: one line with the first wrong rows, the count of others and what is valid.
    """
    frame = getattr(sys.modules.get("pandas"), "DataFrame", ())
    tables = rows.to_dict("records") if isinstance(rows, frame) else list(rows)
    wrong = next((row for row in tables if not isinstance(row, Mapping)), None)
    if wrong is not None:
        raise UserError(
            f"benchmark: {type(wrong).__name__} among the records; valid: a list of dictionaries, or a pandas frame"
        )
    if not tables:
        raise UserError(
            "benchmark has no records; valid: a list or a pandas frame with at least one"
        )
    columns = tuple(dict.fromkeys(str(column) for row in tables for column in row))
    places = [f"row {number}" for number in range(len(tables))]
    return _records(RowTable(tables, places, base.absolute(), name, columns), settings, "benchmark")


def save_records(
    rows: Iterable[Mapping[str, Any]] | DataFrame,
    base: Path,
    folder: Path,
    settings: RecordSettings = RecordSettings(),  # noqa: B008  # frozen
    name: str = "data",
) -> Path:
    """Write tables in memory as a folder below `folder` that `benchmark=data benchmark.path=...` accepts; return it.

    The folder has the digest of the records in its name: equal records give the same folder and the same run key.

    Raises:
        UserError: as `table_of`.
    """
    table = table_of(rows, base, settings, name)
    place = folder / table.digest(Digests())[:16] / name
    table.save(place)
    return place


@lru_cache(maxsize=4)
def _read(path: Path, settings: RecordSettings, stamp: tuple[int, ...]) -> RecordTable:
    return _records_of_path(path, settings)


def _records_of_path(path: Path, settings: RecordSettings) -> RecordTable:
    table = read_rows(path, bare=settings.question is not None)
    return _records(table, settings, f"benchmark.path={str(path)!r}")


def _records(table: RowTable, settings: RecordSettings, source: str) -> RecordTable:
    _check_columns(table.columns, settings, source)
    mistakes = Mistakes(source)
    reader = MediaReader(table.base, table.columns, _cells_by_id(table))
    has_ids = not set(IDS).isdisjoint(table.columns)
    ids: dict[str, str] = {}
    records = []
    for number, (row, place) in enumerate(zip(table.rows, table.places, strict=True)):
        try:
            name = _cell_text("id", _first(row, IDS)) if has_ids else str(number)
            if not name:
                raise WrongCell("no id; valid: each id once, or no such column")
            if name in ids:
                raise WrongCell(f"id {name!r} is also that of {ids[name]}; valid: each id once")
            ids[name] = place
            records.append(_record(row, place, name, settings, reader))
        except WrongCell as error:
            mistakes.add(place, str(error))
    mistakes.check()
    score, reason = chosen_score(records, settings.score, table.columns, table.bare, source)
    check_references(records, score, mistakes)
    mistakes.check()
    _check_categories(records, source)
    return RecordTable(table.name, tuple(records), score, reason, settings.tolerance)


def _record(
    row: Mapping[str, Any], place: str, name: str, settings: RecordSettings, reader: MediaReader
) -> Record:
    media = reader.of(row)
    if not media:
        raise WrongCell("no picture and no video; valid: a path in image, images or video")
    question = settings.question or _cell_text("question", _first(row, QUESTION))
    if not question:
        raise WrongCell("no question; valid: a text in the column question")
    hint = _cell_text(HINT, row.get(HINT))
    extras = {
        str(column): _plain(cell)
        for column, cell in row.items()
        if str(column) not in KNOWN and not is_media_column(str(column))
    }
    return Record(
        place=place,
        id=name,
        question=f"{hint}\n{question}" if hint else question,
        media=media,
        answers=_answers(row),
        choices=_choices(row),
        category=_cell_text(CATEGORY, row.get(CATEGORY)) or None,
        extras=extras,
    )


def _check_columns(columns: Sequence[str], settings: RecordSettings, source: str) -> None:
    """Raise UserError unless a table has the columns that each record needs, and each of them once."""
    for name in columns:
        bare = name.strip()
        if name != bare and (bare in KNOWN or is_media_column(bare)):
            raise UserError(f"{source} has the column {name!r}; valid: {bare!r}, without blanks")
    listed = f"there {'are' if len(columns) > 1 else 'is'}: {', '.join(columns)}"
    if not any(map(is_media_column, columns)):
        raise UserError(
            f"{source} has no column image, images or video{near_names('image', columns, 1)}; {listed}; "
            "valid: a path in one of them"
        )
    if settings.question is None and QUESTION[0] not in columns:
        raise UserError(
            f"{source} has no column question{near_names('question', columns, 1)}; {listed}; valid: that column, or "
            "benchmark.question='...' for all"
        )
    if settings.question is not None and QUESTION[0] in columns:
        raise UserError(
            f"benchmark.question={settings.question!r}: {source} has a column question; valid: one of the two, or "
            "benchmark.text=<a template over the columns>"
        )
    for names in (ANSWERS, CHOICES, IDS):
        present = [name for name in names if name in columns]
        if len(present) > 1:
            raise UserError(f"{source} has the columns {' and '.join(present)}; valid: one of them")


def _check_categories(records: Sequence[Record], source: str) -> None:
    names: dict[str, str] = {}
    for category in dict.fromkeys(r.category for r in records if r.category is not None):
        former = names.setdefault(category_metric("", category), category)
        if former != category:
            raise UserError(
                f"{source}: the categories {former!r} and {category!r} give metrics of one name; valid: "
                "categories that differ in letters or digits"
            )
    if len(names) > MOST_CATEGORIES:
        raise UserError(
            f"{source} has {len(names)} categories; valid: at most {MOST_CATEGORIES}, or another name for the column"
        )


def _cells_by_id(table: RowTable) -> dict[str, Any]:
    """Return the cells of the column `image` by id, where ids are VLMEvalKit's `index`."""
    return {_text(row["index"]): row.get("image") for row in table.rows if "index" in row}


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if not missing(row.get(name))), None)


def _answers(row: Mapping[str, Any]) -> tuple[str, ...]:
    cell = _first(row, ANSWERS)
    if cell is None:
        return ()
    entries = items(cell)
    if entries is None or (
        # "[0.1, 0.2]" is one answer, and so is a text in the column `answer`.
        isinstance(cell, str) and not all(isinstance(entry, str) for entry in entries)
    ):
        entries = [cell]
    if any(map(missing, entries)):
        raise WrongCell("an empty entry in the list of answers; valid: a text for each")
    return tuple(_cell_text("answer", entry) for entry in entries)


def _choices(row: Mapping[str, Any]) -> tuple[str, ...]:
    cell = _first(row, CHOICES)
    if cell is None:
        count = next((n for n in range(26, 0, -1) if not missing(row.get(LETTERS[n - 1]))), 0)
        return tuple(_text(row.get(letter)) for letter in LETTERS[:count]) if count > 1 else ()
    entries = items(cell)
    if entries is None:
        raise WrongCell(
            f"choices {str(cell)[:60]!r} are no list; valid: a list, in CSV as JSON: "
            '["red", "blue"], or columns A, B, C, ...'
        )
    if not 1 < len(entries) <= len(LETTERS) or any(map(missing, entries)):
        raise WrongCell(f"{len(entries)} choices; valid: 2 to {len(LETTERS)}, none of them empty")
    return tuple(_cell_text("choice", entry) for entry in entries)


def _cell_text(column: str, cell: Any) -> str:
    """Return the text of a cell that holds one value; raises WrongCell for a list or a table."""
    if isinstance(cell, Mapping | Sequence | np.ndarray) and not isinstance(cell, str):
        shape = "table" if isinstance(cell, Mapping) else "list"
        raise WrongCell(f"{column} {str(cell)[:60]!r} is a {shape}; valid: a text or a number")
    return _text(cell)


def _text(cell: Any) -> str:
    """Return a cell as text: whole numbers without a fraction, true and false as yes and no."""
    if missing(cell):
        return ""
    if isinstance(cell, np.generic):
        cell = cell.item()
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float) and cell.is_integer():
        # A column of integers with a missing one is a column of floats in pandas.
        return str(int(cell))
    return str(cell).strip()


def _plain(cell: Any) -> Any:
    if missing(cell):
        return None
    return cell if isinstance(cell, str | int | bool) else _text(cell)
