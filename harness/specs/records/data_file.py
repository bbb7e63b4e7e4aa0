"""Rows of a data file or folder: JSON Lines, JSON, CSV, TSV, Parquet, or the pictures of a folder."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.harness.errors import FOREIGN, UserError, foreign
from espalier.harness.paths import IN_PACKAGE
from espalier.harness.specs.records.record import Mistakes

#: Names that a data file of a folder has, the first one found counts; otherwise its only data file.
METADATA = tuple(f"metadata.{ending}" for ending in ("jsonl", "csv", "tsv", "parquet", "json"))

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
VIDEOS = (".mp4", ".mkv", ".webm", ".avi", ".mov", ".m4v")

#: First bytes of archives, and their endings.
ARCHIVES = {b"PK\x03\x04": "zip", b"\x1f\x8b": "gzip", b"7z\xbc\xaf": "7z", b"Rar!": "rar"}
ARCHIVE_ENDINGS = (".zip", ".tar", ".tgz", ".gz", ".7z", ".rar", ".xz", ".bz2", ".zst")
SPREADSHEETS = (".xlsx", ".xls", ".ods", ".numbers")

#: First bytes of texts that are not UTF-8; those of UTF-32 begin with those of UTF-16.
MARKS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}

#: Separators of the columns of tables.
SEPARATORS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/{1,3}(?=[^/])")

#: Remedy for an address where something is written.
ON_THIS_MACHINE = "a path on this machine"

VALID = "a .jsonl, .json, .csv, .tsv or .parquet file, or a folder with one beside its pictures"


@dataclass(frozen=True)
class RowTable:
    """Rows as written in a file.

    Attributes:
        rows: columns by name.
        places: position of each row, for error lines.
        base: folder at which relative paths start.
        name: of the file without its ending, or of the folder.
        columns: names of all columns.
        bare: whether there is no data file, so that each row is a file of the folder.
    """

    rows: Sequence[Mapping[str, Any]]
    places: Sequence[str]
    base: Path
    name: str
    columns: tuple[str, ...]
    bare: bool = False


def read_rows(path: Path, bare: bool) -> RowTable:
    """Return the rows of a data file or folder.

    Args:
        path: file or folder.
        bare: whether a folder without a data file gives a row for each picture and video.

    Raises:
        UserError: one line with the file, the first wrong lines and what is valid.
    """
    source = f"benchmark.path={str(path)!r}"
    if path.is_dir():
        file = _data_file(path, source, bare)
        if file is None:
            return _media_rows(path, source)
        source, name = f"{source}: {file.name}", path.name if file.name in METADATA else file.stem
        return _file_rows(file, source, name or "root")
    if not path.is_file():
        state = "is not a file" if path.exists() else "does not exist"
        raise UserError(f"{source} {state}; valid: {VALID}")
    return _file_rows(path, source, path.stem)


def is_data(text: str) -> bool:
    """Return whether a text is a path of data and no name: it ends as a data file does, or is there and has a slash."""
    ending = os.path.splitext(text)[1].lower()
    return ending in READERS or ("/" in text and os.path.exists(os.path.expanduser(text)))


def check_address(
    key: str, path: Any, valid: str = "the path of a downloaded file or folder"
) -> None:
    """Raise UserError if the value of a key that holds a path is an address of the network."""
    if isinstance(path, str) and ADDRESS.match(path) and not path.startswith(IN_PACKAGE):
        raise UserError(f"{key}={path!r} is an address, and nothing is downloaded; valid: {valid}")


def _data_file(folder: Path, source: str, bare: bool) -> Path | None:
    """Return the data file of a folder; None: its pictures are the rows."""
    for name in METADATA:
        if (folder / name).is_file():
            return folder / name
    with foreign(f"{source} cannot be listed", "a folder that you may read"):
        files = sorted(
            file
            for file in folder.iterdir()
            if file.suffix.lower() in READERS and not file.name.startswith(".")
        )
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:5])
        raise UserError(f"{source} has several data files: {names}; valid: the path of one of them")
    if not bare:
        raise UserError(
            f"{source} has no data file; valid: {METADATA[0]} or {METADATA[1]} beside the pictures, or "
            "benchmark.question='...', which is asked about every picture"
        )
    return None


def _media_rows(folder: Path, source: str) -> RowTable:
    files = sorted(
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGES + VIDEOS
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not files:
        raise UserError(
            f"{source} has no pictures and no videos; valid: a folder with {', '.join((*IMAGES, *VIDEOS))}"
        )
    kinds = ["video" if file.suffix.lower() in VIDEOS else "image" for file in files]
    rows = [
        {"id": file.as_posix(), kind: str(folder / file)}
        for file, kind in zip(files, kinds, strict=True)
    ]
    return RowTable(
        rows,
        places=[f"file {file.as_posix()!r}" for file in files],
        base=folder,
        name=folder.name,
        columns=("id", *sorted(set(kinds))),
        bare=True,
    )


def _file_rows(file: Path, source: str, name: str) -> RowTable:
    suffix = file.suffix.lower()
    with foreign(f"{source} cannot be read", VALID), file.open("rb") as stream:
        head = stream.read(8)
    archive = next((kind for mark, kind in ARCHIVES.items() if head.startswith(mark)), "")
    if suffix in SPREADSHEETS:
        raise UserError(f"{source} is a spreadsheet; valid: the sheet saved as CSV in UTF-8")
    if archive or suffix in ARCHIVE_ENDINGS:
        raise UserError(
            f"{source} is an archive ({archive or suffix[1:]}); valid: the path of the unpacked file or folder"
        )
    if suffix not in READERS:
        ending = f"ends in {suffix!r}" if suffix else "has no ending"
        raise UserError(f"{source} {ending}; valid: {VALID}")
    if not head:
        raise UserError(f"{source} is empty; valid: {VALID}, with at least one record")
    rows, places = READERS[suffix](file, source)
    if not rows:
        raise UserError(
            f"{source} has no records; valid: at least one below the names of the columns"
        )
    columns = tuple(dict.fromkeys(str(column) for row in rows for column in row))
    return RowTable(rows, places, file.absolute().parent, name, columns)


def _text(file: Path, source: str) -> str:
    """Return a file's text.

    Raises:
        UserError: it is not UTF-8; the line names the first wrong line.
    """
    with foreign(f"{source} cannot be read", VALID):
        content = file.read_bytes()
    encoding = next((name for mark, name in MARKS.items() if content.startswith(mark)), None)
    if encoding is None and b"\0" in content[:4096]:
        encoding = "UTF-16 or binary"
    remedy = f"valid: UTF-8, as by: iconv -f {{}} -t UTF-8 < {file.name} > utf8{file.suffix}"
    if encoding is not None:
        raise UserError(f"{source} is {encoding}; {remedy.format(encoding.partition(' ')[0])}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{source}: line {line} is not UTF-8 (byte 0x{content[error.start]:02x}); "
            f"{remedy.format('LATIN1')}"
        ) from error


def _json_lines(file: Path, source: str) -> tuple[list[Any], list[str]]:
    mistakes, rows, places = Mistakes(source), [], []
    for number, line in enumerate(_text(file, source).split("\n"), 1):
        if not line.strip():
            continue
        place = f"line {number}"
        try:
            row = json.loads(line)
        except FOREIGN as error:
            mistakes.add(place, f"no JSON ({error}); valid: one {{...}} a line")
            continue
        if not isinstance(row, dict):
            mistakes.add(
                place, f"{type(row).__name__} in place of a table; valid: one {{...}} a line"
            )
            continue
        rows.append(row)
        places.append(place)
    mistakes.check()
    return rows, places


def _json(file: Path, source: str) -> tuple[list[Any], list[str]]:
    with foreign(f"{source} is no JSON", "a list of tables [{...}, ...]"):
        rows = json.loads(_text(file, source))
    if not isinstance(rows, list):
        raise UserError(f"{source} holds no list; valid: a list of tables [{{...}}, ...]")
    mistakes = Mistakes(source)
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            mistakes.add(f"entry {number}", f"{type(row).__name__}; valid: a table {{...}}")
    mistakes.check()
    return rows, [f"entry {number}" for number in range(len(rows))]


def _separated(file: Path, source: str) -> tuple[list[Any], list[str]]:
    text, delimiter = _text(file, source), "\t" if file.suffix.lower() == ".tsv" else ","
    if "\r" in text.partition("\n")[0].rstrip("\r"):
        raise UserError(
            f"{source}: line 1 ends in a carriage return alone; valid: line ends of Linux or Windows, as by: "
            f"tr '\\r' '\\n' < {file.name} > lines{file.suffix}"
        )
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    with foreign(f"{source}: line 1 cannot be read", VALID, (csv.Error,)):
        header = next(lines, [])
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        raise UserError(f"{source}: line 1 has the column {twice[0]!r} twice; valid: once")
    for separator in SEPARATORS if len(header) == 1 else ():
        if separator in header[0]:
            raise UserError(
                f"{source}: line 1 has columns between {SEPARATORS[separator]}s; valid: {SEPARATORS[delimiter]}s "
                f"in a file that ends in {file.suffix}"
            )
    mistakes, rows, places = Mistakes(source), [], []
    start, usual_limit = lines.line_num + 1, csv.field_size_limit(len(text))  # of pictures in cells
    try:
        with foreign(f"{source} cannot be read", VALID, (csv.Error,)):
            for cells in lines:
                place, start = f"line {start}", lines.line_num + 1
                if len(cells) == len(header) and any(cells):
                    rows.append(dict(zip(header, cells, strict=True)))
                    places.append(place)
                elif len(cells) != len(header) and (
                    cells[1:] or not "".join(cells or " ").isspace()
                ):
                    mistakes.add(
                        place,
                        f"{len(cells)} fields, and the header has {len(header)}; valid: as many, with values that "
                        'hold separators or line ends in "quotes"',
                    )
    finally:
        csv.field_size_limit(usual_limit)
    mistakes.check()
    return rows, places


def _parquet(file: Path, source: str) -> tuple[list[Any], list[str]]:
    # pyarrow takes a quarter of a second to import.
    import pyarrow as pa
    from pyarrow import parquet

    with foreign(f"{source} cannot be read", "a whole Parquet file", (pa.ArrowException,)):
        rows = parquet.read_table(file).to_pylist()
    return rows, [f"row {number}" for number in range(len(rows))]


#: Readers by the endings of data files.
READERS: Mapping[str, Callable[[Path, str], tuple[list[Any], list[str]]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _separated,
    ".tsv": _separated,
    ".parquet": _parquet,
}
