"""Records of the user's own data: a question about pictures or videos, with its answers and choices."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from espalier.harness.errors import UserError
from espalier.harness.settings import Must, OneOf, Text
from espalier.harness.store.files.dataset_copies import content_listing
from espalier.harness.store.files.digests import Digests, digest
from espalier.harness.store.files.durable import replace

#: `benchmark.score`.
SCORES = ("exact", "contains", "choice", "yes_no", "anls", "number", "none")

#: Number of mistakes that an error line spells out.
NAMED = 3

#: Name of the data file in a folder, as in Hugging Face's image folders.
DATA_FILE = "metadata.jsonl"
#: Folder of the pictures that a data file or the memory holds itself.
MEDIA = "media"

Tolerated = Annotated[
    float, Must("a number of at least 0", lambda value: 0 <= value < float("inf"))
]


@dataclass(frozen=True)
class Tolerance:
    """How far a number may be from the reference: the larger of `relative` times the reference and `absolute`."""

    relative: Tolerated = 0.0
    absolute: Tolerated = 0.0


@dataclass(frozen=True)
class RecordSettings:
    """What the config states about own data.

    Attributes:
        score: one of SCORES; None: chosen from the columns.
        question: the question of every record; None: the column `question`.
        tolerance: of `score=number`.
    """

    score: Annotated[str, OneOf(SCORES)] | None = None
    question: Text | None = None
    tolerance: Tolerance = Tolerance()


@dataclass(frozen=True)
class Medium:
    """A picture or a video: a file, or the content of one.

    Attributes:
        kind: `image` or `video`.
        path: absolute path of the file; None: `content` has it.
        content: the bytes of the file.
    """

    kind: str
    path: Path | None = None
    content: bytes = field(default=b"", repr=False)

    def origin(self) -> str:
        """Return the path of the file, or the SHA-256 of the content as hex."""
        return hashlib.sha256(self.content).hexdigest() if self.path is None else str(self.path)

    def saved(self, folder: Path) -> str:
        """Return the path of the file; content is written to a file of `folder` that is named by its digest."""
        if self.path is not None:
            return str(self.path)
        file = folder.absolute() / self.origin()[:16]
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            replace(file, self.content)
        return str(file)


@dataclass(frozen=True)
class Record:
    """A question about pictures or videos.

    Attributes:
        place: its position in the data, for error lines: `line 3`.
        id: unique in the data.
        question: its text, without the choices.
        media: pictures, then videos.
        answers: accepted answers; none where nothing is scored.
        choices: texts of the options A, B, ..., empty where one is missing.
        category: of per-category metrics; None: none.
        extras: further columns, which `benchmark.text` may name.
    """

    place: str
    id: str
    question: str
    media: tuple[Medium, ...]
    answers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    category: str | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordTable:
    """The records of one data file, folder or table in memory.

    Attributes:
        name: of the file without its ending, or of the folder.
        records: at least one.
        score: one of SCORES.
        reason: why this score was chosen; "" if the user chose it.
        tolerance: of `score=number`.
    """

    name: str
    records: tuple[Record, ...]
    score: str
    reason: str = ""
    tolerance: Tolerance = Tolerance()

    @property
    def categories(self) -> tuple[str, ...]:
        """The categories in the order of their first record."""
        return tuple(dict.fromkeys(r.category for r in self.records if r.category is not None))

    @property
    def has_video(self) -> bool:
        """Whether a record has a video."""
        return any(medium.kind == "video" for record in self.records for medium in record.media)

    def digest(self, digests: Digests) -> str:
        """Return one digest of all records and the contents of their media, in any folder.

        Cost: one read of each media file, once until it changes.

        Raises:
            UserError: a media file cannot be read any more.
        """
        media = {medium for record in self.records for medium in record.media}
        paths = sorted(str(medium.path) for medium in media if medium.path is not None)
        files = [(path, Path(path)) for path in paths]
        contents = dict(content_listing(["records", paths], files, digests))
        return digest(self._listing(lambda medium: contents.get(medium.origin(), medium.origin())))

    def listing_digest(self) -> str:
        """Return a digest of the records, the origins of their media and the score, which reads no file."""
        return digest((self.score, asdict(self.tolerance), self._listing(Medium.origin)))

    def _listing(self, name: Callable[[Medium], str]) -> list[Any]:
        return [
            (
                *(record.id, record.question, record.answers, record.choices, record.category),
                dict(record.extras),
                [(medium.kind, name(medium)) for medium in record.media],
            )
            for record in self.records
        ]

    def save(self, folder: Path) -> Path:
        """Write the records as a folder that `benchmark.path` accepts, and return its data file.

        Pictures in files stay where they are; those of the memory or of base64 columns become files of `folder`. A
        folder with these records is left as it is.
        """
        lines = []
        for record in self.records:
            media: dict[str, list[str]] = {"image": [], "video": []}
            for medium in record.media:
                media[medium.kind].append(medium.saved(folder / MEDIA))
            columns = {
                **record.extras,
                "id": record.id,
                "images": media["image"],
                "video": media["video"],
                "question": record.question,
                # A table without answers has no column of them.
                **({"answers": list(record.answers)} if record.answers else {}),
                **({"choices": list(record.choices)} if record.choices else {}),
                **({"category": record.category} if record.category is not None else {}),
            }
            if self.score == "number":
                columns["tolerance"] = list(asdict(self.tolerance).values())
            lines.append(json.dumps(columns, ensure_ascii=False) + "\n")
        file, content = folder / DATA_FILE, "".join(lines).encode("utf-8", "surrogatepass")
        if not file.is_file() or file.read_bytes() != content:
            folder.mkdir(parents=True, exist_ok=True)
            replace(file, content)
        return file


@dataclass
class Mistakes:
    """Mistakes of a data file, collected so that one line can name the first ones and count the others.

    Args:
        source: the config key with the file, which begins the line.
    """

    source: str
    lines: list[str] = field(default_factory=list)

    def add(self, place: str, text: str) -> None:
        """Note a mistake at a place."""
        self.lines.append(f"{place}: {text}")

    def check(self) -> None:
        """Raise UserError if there are mistakes."""
        if self.lines:
            unnamed = len(self.lines) - NAMED
            tail = f"; and {unnamed} more mistake{'s' * (unnamed > 1)}" if unnamed > 0 else ""
            raise UserError(f"{self.source}: {'; '.join(self.lines[:NAMED])}{tail}")


def category_metric(metric: str, category: str) -> str:
    """Return the name of a metric over one category."""
    return f"{metric}_" + re.sub(r"[^\w.-]+", "_", category)
