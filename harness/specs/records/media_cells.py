"""From the cells of a row to pictures and videos: paths, base64, bytes, PIL images, arrays, and lists of them."""

from __future__ import annotations

import ast
import base64
import binascii
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from espalier.harness.errors import FOREIGN, UserError
from espalier.harness.media.images import BROKEN, complete_only
from espalier.harness.specs.records.data_file import ADDRESS, VIDEOS
from espalier.harness.specs.records.record import Medium

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
    if cell is None:
        return True
    if isinstance(cell, str):
        return not cell or cell.isspace()
    if isinstance(cell, list | tuple | Mapping):
        return not cell
    # NaN and pandas' NaT are unequal to themselves; pandas' NA has no truth value.
    return type(cell).__name__ == "NAType" or (np.ndim(cell) == 0 and bool(cell != cell))


def items(cell: Any) -> list[Any] | None:
    """Return the entries of a list, or of a text that holds one as JSON or as Python prints it; None: no list."""
    if isinstance(cell, list | tuple):
        return list(cell)
    if isinstance(cell, np.ndarray) and cell.dtype == object:
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
        filled = [
            [row[name] for name in group if not missing(row.get(name))]
            for group in (groups if self._has_main else [(name,) for name in PATHS])
        ]
        filled = [cells for cells in filled if cells]
        if len(filled) > 1:
            raise WrongCell(
                "pictures in several columns; valid: image, images or image_1, image_2, ..."
            )
        cells = filled[0] if filled else []
        media = [medium for cell in cells for medium in self._media("image", cell)]
        if not missing(row.get(VIDEO)):
            media += self._media("video", row[VIDEO])
        return tuple(sorted(media, key=lambda medium: medium.kind))

    @property
    def _has_main(self) -> bool:
        return any(
            column in (IMAGE, IMAGE_LIST) or NUMBERED.fullmatch(column) for column in self.columns
        )

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
            return [_checked_content(kind, entry)]
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
        if (kind, text) in self._files:
            return [self._files[kind, text]]
        path = self.base / text if len(text) < 4096 and "\0" not in text else None
        if path is not None and os.path.isfile(path):
            self._files[kind, text] = _checked_file(kind, path)
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
                content = base64.b64decode(compact, _altchars(compact), validate=True)
                return [_checked_content(kind, content)]
            except binascii.Error as error:
                raise WrongCell(
                    f"{kind} {_short(text)} is no whole base64 ({error}); valid: a path, or a whole file in base64"
                ) from error
        state = "does not exist"
        if path is not None and os.path.lexists(path):
            state = "is a folder" if os.path.isdir(path) else "is no file and leads to none"
        at = "" if os.path.isabs(text) else f" in {str(self.base)!r}"
        raise WrongCell(f"{kind} {_short(text)} {state}{at}; valid: the path of the file")


def _checked_file(kind: str, path: Path) -> Medium:
    """Return the medium of a file, by its ending or else of the column's kind."""
    kind = "video" if path.suffix.lower() in VIDEOS else kind
    problem = _picture_problem(path) if kind == "image" else _video_problem(path)
    if problem:
        raise WrongCell(f"{kind} {_short(str(path))} {problem}")
    return Medium(kind, path)


def _altchars(text: str) -> bytes | None:
    return b"-_" if "-" in text or "_" in text else None


def _checked_content(kind: str, content: bytes) -> Medium:
    problem = _picture_problem(BytesIO(content)) if kind == "image" else ""
    if problem:
        raise WrongCell(f"{kind} of {len(content)} bytes {problem}")
    return Medium(kind, content=content)


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
