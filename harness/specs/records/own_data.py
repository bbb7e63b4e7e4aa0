"""Own data as records: from a file or folder (`benchmark.path`), a list of tables, or a pandas frame."""

from __future__ import annotations

import ast
import base64
import binascii
import json
import os
import re
import string
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from espalier.harness.errors import FOREIGN, UserError, near_names
from espalier.harness.media.images import BROKEN, complete_only
from espalier.harness.specs.records.data_file import ADDRESS, VIDEOS, RowTable, read_rows
from espalier.harness.specs.records.record import (
    Medium,
    Mistakes,
    Record,
    RecordSettings,
    RecordTable,
    category_metric,
)
from espalier.harness.store.files.digests import Digests

if TYPE_CHECKING:
    from pandas import DataFrame

#: Columns of pictures; a table has one kind of them; `image_1`, `image_2`, ... are several pictures.
IMAGE, IMAGE_LIST, NUMBERED = "image", "images", re.compile(r"image_?(\d+)")
#: Columns that count in a table without the ones above.
PATHS = ("image_path", "file_name", "file_names")
VIDEO = "video"

#: Shorter texts are no base64 of a picture, but the index of another row, as in VLMEvalKit's tables.
SHORTEST = 64

#: The last bytes of a whole picture by Pillow's name of its format; a little may follow them.
END_MARKS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
END_BYTES = 64
BASE64 = re.compile(r"[A-Za-z0-9+/_-]+")


class WrongCell(ValueError):
    """A cell is not what its column needs; the text follows the place in an error line."""


def is_media_column(column: str) -> bool:
    """Return whether a column holds pictures or videos."""
    return column in (IMAGE, IMAGE_LIST, VIDEO, *PATHS) or NUMBERED.fullmatch(column) is not None


def missing(cell: Any) -> bool:
    """Return whether a cell is empty: None, NaN, a text of blanks, a list without entries."""
    if cell is None or isinstance(cell, str | list | tuple | Mapping):
        return not (cell.strip() if isinstance(cell, str) else cell)
    # NaN and pandas' NaT are unequal to themselves; pandas' NA has no truth value.
    return type(cell).__name__ == "NAType" or (np.ndim(cell) == 0 and bool(cell != cell))


def items(cell: Any) -> list[Any] | None:
    """Return the entries of a list, or of a text that holds one as JSON or as Python prints it; None: no list."""
    if isinstance(cell, list | tuple) or (isinstance(cell, np.ndarray) and cell.dtype == object):
        return list(cell)
    if not isinstance(cell, str) or not cell.strip().startswith("["):
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            entries = read(cell.strip())
        except FOREIGN:
            continue
        return entries if isinstance(entries, list) else None
    return None


@dataclass
class MediaReader:
    """Finds the media of rows, and checks that each is a readable picture or video by its header.

    Args:
        base: folder at which relative paths start.
        columns: of the table.
        shared: cells of the column `image` by the row's id, for rows that name another one in place of a picture.
    """

    base: Path
    columns: Sequence[str]
    shared: Mapping[str, Any] = field(default_factory=dict)
    _files: dict[tuple[str, str], Medium] = field(default_factory=dict)

    def of(self, row: Mapping[str, Any]) -> tuple[Medium, ...]:
        """Return the pictures of a row, then its videos.

        Raises:
            WrongCell: a file is missing or no picture, or several columns have pictures.
        """
        numbered = sorted(
            (column for column in row if NUMBERED.fullmatch(column)),
            key=lambda column: int(NUMBERED.fullmatch(column)[1]),  # type: ignore[index]  # it matches
        )
        groups = [(IMAGE,), (IMAGE_LIST,), tuple(numbered)]
        has_main = any(
            is_media_column(name) and name not in (VIDEO, *PATHS) for name in self.columns
        )
        filled = [
            cells
            for group in (groups if has_main else [(name,) for name in PATHS])
            if (cells := [row[name] for name in group if not missing(row.get(name))])
        ]
        if len(filled) > 1:
            raise WrongCell(
                "pictures in several columns; valid: image, images or image_1, image_2, ..."
            )
        media = [
            medium for cells in filled for cell in cells for medium in self._media("image", cell)
        ]
        if not missing(row.get(VIDEO)):
            media += self._media("video", row[VIDEO])
        return tuple(sorted(media, key=lambda medium: medium.kind))

    def _media(self, kind: str, cell: Any) -> Iterator[Medium]:
        entries = items(cell)
        for entry in [cell] if entries is None else entries:
            if missing(entry):
                raise WrongCell(f"an empty entry in the list of {kind}s; valid: a path for each")
            yield from self._medium(kind, entry)

    def _medium(self, kind: str, entry: Any) -> list[Medium]:
        if isinstance(entry, Mapping):
            content, path = entry.get("bytes"), entry.get("path")
            if content is None and path is None:
                raise WrongCell(
                    f"{kind} is a table of {', '.join(map(str, entry))}; valid: a path, or a table of bytes, path"
                )
            entry = path if content is None else content
        if isinstance(entry, bytes):
            return [_checked(kind, entry)]
        if isinstance(entry, Image.Image | np.ndarray) and kind == "image":
            return [Medium("image", content=_png(entry))]
        if isinstance(entry, os.PathLike):
            entry = os.fspath(entry)
        if not isinstance(entry, str):
            raise WrongCell(
                f"{kind} is of type {type(entry).__name__}; valid: a path, base64, bytes, a PIL image or an array of "
                "8-bit integers"
            )
        return self._from_text(kind, entry.strip())

    def _from_text(self, kind: str, text: str) -> list[Medium]:
        path = self.base / text if len(text) < 4096 and "\0" not in text else None
        if path is not None and os.path.isfile(path):
            if (kind, text) not in self._files:
                self._files[kind, text] = _checked(kind, path)
            return [self._files[kind, text]]
        if text.startswith("data:"):
            text = text.partition(",")[2]
        elif ADDRESS.match(text):
            raise WrongCell(f"{kind} {_short(text)} is an address; valid: a downloaded file")
        named = self.shared.get(text) if len(text) <= SHORTEST else None
        if isinstance(named, str) and len(named) > SHORTEST:
            return list(self._media(kind, named))
        compact = "".join(text.split()) if len(text) > SHORTEST else ""
        # A long path has an ending.
        if BASE64.fullmatch(compact[:SHORTEST]) and "." not in compact[-6:]:
            try:
                altchars = b"-_" if "-" in compact or "_" in compact else None
                return [_checked(kind, base64.b64decode(compact, altchars, validate=True))]
            except binascii.Error as error:
                raise WrongCell(
                    f"{kind} {_short(text)} is no whole base64 ({error}); valid: a path, or a whole file in base64"
                ) from error
        state = "does not exist"
        if path is not None and os.path.lexists(path):
            state = "is a folder" if os.path.isdir(path) else "is no file and leads to none"
        at = "" if os.path.isabs(text) else f" in {str(self.base)!r}"
        raise WrongCell(f"{kind} {_short(text)} {state}{at}; valid: the path of the file")


def _checked(kind: str, source: Path | bytes) -> Medium:
    """Return the medium of a file, by its ending or else of the column's kind, or of the content of one."""
    if isinstance(source, bytes):
        medium, name = Medium(kind, content=source), f"of {len(source)} bytes"
        problem = _picture_problem(BytesIO(source)) if kind == "image" else ""
    else:
        medium = Medium("video" if source.suffix.lower() in VIDEOS else kind, source)
        problem = _picture_problem(source) if medium.kind == "image" else _video_problem(source)
        name = _short(str(source))
    if problem:
        raise WrongCell(f"{medium.kind} {name} {problem}")
    return medium


def _picture_problem(source: Path | BytesIO) -> str:
    """Return the fault of a picture by its header and its end, "" if it can be opened.

    Pixels are decoded only where the file has no known last mark, or not at its end.
    """
    try:
        with warnings.catch_warnings():
            # Half of Pillow's limit is a warning; the limit itself is an error.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(source) as image:
                size = image.size
                if not _ends(source, str(image.format)):
                    with complete_only():
                        image.load()
    except (*BROKEN, Image.DecompressionBombError) as error:
        empty = isinstance(source, Path) and not source.stat().st_size
        broken = str(error) if "truncated" in str(error) else type(error).__name__
        reason = "it is empty" if empty else broken
        return f"cannot be opened as a picture ({reason}); valid: JPEG, PNG, WebP or the like"
    return "" if min(size) > 0 else "has no pixels; valid: a picture with pixels"


def _ends(source: Path | BytesIO, kind: str) -> bool:
    """Return whether a file ends with the last mark of its format; False for a format without one."""
    mark = END_MARKS.get(kind)
    if mark is None:
        return False
    with source.open("rb") if isinstance(source, Path) else nullcontext(source) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - END_BYTES, 0))
        return mark in file.read()


def _video_problem(path: Path) -> str:
    # PyAV takes a tenth of a second to import.
    from espalier.harness.media.timeline import open_video, packets

    try:
        with open_video(path) as (container, stream):
            empty = next(packets(container, stream), None) is None
            return "has no frames; valid: MP4, MKV or the like" if empty else ""
    except UserError as error:
        return f"{str(error).rpartition(repr(str(path)))[2].strip()}; valid: MP4, MKV or the like"


def _png(picture: Image.Image | np.ndarray) -> bytes:
    """Return a picture of the memory as a PNG file, without loss."""
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or not (
            picture.ndim == 2 or (picture.ndim == 3 and picture.shape[2] in (3, 4))
        ):
            raise WrongCell(
                f"image is an array of {picture.dtype} of shape {picture.shape}; valid: uint8, (height, width) or "
                "(height, width, 3)"
            )
        picture = Image.fromarray(picture)
    file = BytesIO()
    try:
        # PNG files written here have no orientation tag.
        picture = ImageOps.exif_transpose(picture)
        lossless = picture.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16")
        (picture if lossless else picture.convert("RGB")).save(file, "PNG")
    except BROKEN as error:
        raise WrongCell(
            f"image cannot be read ({type(error).__name__}); valid: a whole picture"
        ) from error
    return file.getvalue()


def _short(text: str) -> str:
    return repr(text) if len(text) <= 120 else f"{text[:60]!r}... ({len(text)} characters)"


#: Columns of references.
ANSWERS = ("answer", "answers")

YES_NO = ("yes", "no")

#: A number with a sign, thousands separators, a fraction or an exponent; currency and percent signs are units.
NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w])"
)


def chosen_score(
    records: Sequence[Record], score: str | None, columns: Sequence[str], bare: bool, source: str
) -> tuple[str, str]:
    """Return the score of records and why it was chosen ("" for the user's own).

    Args:
        records: all of them.
        score: the user's choice; None: by the columns.
        columns: names of the columns.
        bare: whether the records are files without a table.
        source: the config key with the file, for the error line.

    Raises:
        UserError: there are no answers, and the user did not choose `none`.
    """
    if score is not None:
        return score, ""
    if bare:
        return "none", "there are files without answers"
    if not any(column in ANSWERS for column in columns):
        raise UserError(
            f"{source} has no column answer or answers{near_names('answer', columns, 1)}; valid: that column, or "
            "benchmark.score=none, which stores answers without a score"
        )
    if any(record.choices for record in records):
        return "choice", "the records have choices"
    answers = [answer for record in records for answer in record.answers]
    if answers and all(plain_yes_no(answer) for answer in answers):
        return "yes_no", "all answers are yes or no"
    return "exact", "the records have answers and no choices"


def options_of(choices: Sequence[str]) -> dict[str, str]:
    """Return choices by letter; empty ones are missing."""
    return {chr(65 + place): text for place, text in enumerate(choices) if text}


def right_letter(answer: str, options: Mapping[str, str]) -> str:
    """Return the letter of a reference, which is a letter or the text of a choice; "" if it is neither."""
    letter = answer.strip().strip("().:").upper()
    if letter in options:
        return letter
    letters = [
        name
        for name, text in options.items()
        if text.strip().casefold() == answer.strip().casefold()
    ]
    return letters[0] if len(letters) == 1 else ""


def plain_yes_no(answer: str) -> str:
    """Return yes or no for a reference that is one of these words, else ""."""
    word = answer.strip().rstrip(".").casefold()
    return word if word in YES_NO else ""


def numbers(text: str) -> list[float]:
    """Return the numbers of a text; `1,200` is one of them, and `3a` holds none."""
    matches = (match[0] for match in NUMBER.finditer(text) if any(c.isdigit() for c in match[0]))
    return [float(number.replace(",", "").replace("\u2212", "-")) for number in matches]


def _problem(record: Record, score: str) -> str:
    """Return the fault of a record's reference; "" if it can be scored."""
    if not record.answers:
        return "no answer; valid: a text in the column answer, or benchmark.score=none"
    if score == "choice":
        if not record.choices:
            return "no choices; valid: choices for every record, or benchmark.score=exact"
        options = options_of(record.choices)
        wrong = [answer for answer in record.answers if not right_letter(answer, options)]
        listed = ", ".join(f"{letter} ({text[:30]})" for letter, text in options.items())
        return f"answer {wrong[0]!r} is none of the choices; valid: {listed}" if wrong else ""
    if score == "yes_no":
        wrong = [answer for answer in record.answers if not plain_yes_no(answer)]
        return f"answer {wrong[0]!r}; valid: yes or no, or benchmark.score=exact" if wrong else ""
    if score == "number":
        wrong = [answer for answer in record.answers if len(numbers(answer)) != 1]
        return f"answer {wrong[0]!r} is no number; valid: one number" if wrong else ""
    return ""


#: Columns by meaning; the first name is the one that pages use. Others are VLMEvalKit's and Hugging Face's.
QUESTION, HINT = ("question",), "hint"
CHOICES = ("choices", "options")
IDS = ("id", "index")
CATEGORY = "category"
LETTERS = string.ascii_uppercase
KNOWN = (*QUESTION, *ANSWERS, *CHOICES, *IDS, CATEGORY, HINT, "tolerance")


def read_records(path: Path, settings: RecordSettings) -> RecordTable:
    """Return the records of a data file or folder; a file that has not changed is read once in a process.

    Raises:
        UserError: one line with the file, the first wrong lines, the count of others and what is valid.
    """
    # A folder is read each time: its pictures may have changed.
    stamp = (path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else object()
    return _read(path, settings, stamp)


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
def _read(path: Path, settings: RecordSettings, _stamp: object) -> RecordTable:
    table = read_rows(path, bare=settings.question is not None)
    return _records(table, settings, f"benchmark.path={str(path)!r}")


def _records(table: RowTable, settings: RecordSettings, source: str) -> RecordTable:
    _check_columns(table.columns, settings, source)
    mistakes = Mistakes(source)
    # VLMEvalKit's tables name the picture of another row by its `index`.
    shared = {_text(row["index"]): row.get(IMAGE) for row in table.rows if "index" in row}
    reader = MediaReader(table.base, table.columns, shared)
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
    for record in records if score != "none" else ():
        if problem := _problem(record, score):
            mistakes.add(record.place, problem)
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
