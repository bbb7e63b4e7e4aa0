"""Rows of a benchmark as its task reads them: columns exist, media open."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmms_eval.api.task import Task
from lmms_eval.protocol import ChatMessages

from espalier.harness.errors import UserError
from espalier.harness.evaluation.data_sources import Borders
from espalier.harness.models.chat_media import media_of
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.run_spec import VideoSpec

#: Rows to read.
ROWS = 5

#: A name that a task file gives in place of a function: of a column, not a template and not a text.
COLUMN = re.compile(r"[A-Za-z_]\w*")

#: Settings of a task file that may name a column.
NAMING = ("doc_to_text", "doc_to_target", "doc_to_choice")

#: Errors of reading rows that are not as their task expects.
ODD = (
    *(KeyError, IndexError, TypeError, ValueError, AttributeError, OSError, AssertionError),
    *(ZeroDivisionError, SystemExit),
)


@dataclass(frozen=True)
class RowSummary:
    """A summary of the first rows of a task: their number, and the largest counts in one row."""

    rows: int
    clips: int
    pictures: int
    words: int
    first: str


def read_rows(
    benchmark: BenchmarkSpec, task: Task, score: bool, borders: Borders | None = None
) -> RowSummary:
    """Read the first rows of a task and all their media.

    Args:
        benchmark: named in errors.
        task: loaded.
        score: whether an empty answer is scored too; false if that would call a judge.
        borders: where media may come from; None: from anywhere.

    Raises:
        UserError: with data set, split and row: a column is missing, or media cannot be read.
    """
    docs = task.eval_docs
    split = task.config.test_split or task.config.validation_split
    place = f"{benchmark.dataset.path or task.config.dataset_path}, split {split}"
    if not len(docs):
        raise UserError(f"{place}: no rows")
    columns = list(docs.column_names) if hasattr(docs, "column_names") else list(docs[0])
    for setting in NAMING:
        name = getattr(task.config, setting)
        if isinstance(name, str) and COLUMN.fullmatch(name) and name not in columns:
            raise UserError(f"{place}: {_no_column(name, columns)}, which {setting} names")
    summaries = [
        _row(f"{place}, row {number}", task, number, columns, score, borders)
        for number in range(min(ROWS, len(docs)))
    ]
    largest = max(summaries, key=lambda summary: (summary.clips, summary.pictures, summary.words))
    return RowSummary(
        len(summaries), largest.clips, largest.pictures, largest.words, summaries[0].first
    )


def _row(
    place: str, task: Task, number: int, columns: list[str], score: bool, borders: Borders | None
) -> RowSummary:
    # Pictures of a data set are decoded here.
    doc = _read_checked(place, columns, lambda: task.eval_docs[number])
    messages = _read_checked(place, columns, lambda: task.doc_to_messages(doc))
    chat: list[dict[str, Any]] = ChatMessages(messages=messages).to_hf_messages()
    try:
        chat = chat if borders is None else borders.chat(chat)
        media = media_of(0, chat, VideoSpec(frames=2))
    except UserError as error:
        raise UserError(f"{place}: {str(error).removeprefix('chat 0 of the batch: ')}") from error
    target = _read_checked(place, columns, lambda: task.doc_to_target(doc))
    if score:
        plain = getattr(type(task).process_results, "__wrapped__", type(task).process_results)
        _read_checked(place, columns, lambda: plain(task, doc, [""]))
    text = "".join(
        part["text"] for turn in chat for part in turn["content"] if part["type"] == "text"
    )
    parts = [f"picture {picture.width}x{picture.height}" for picture in media.pictures[:1]]
    parts += [f"video of {clip.duration:.1f} s" for clip in media.clips[:1]]
    return RowSummary(
        1,
        len(media.clips),
        len(media.pictures),
        len(text.split()),
        f"{', '.join(parts) or 'no media'}; {len(text)} characters; target {str(target)[:40]!r}",
    )


def _read_checked(place: str, columns: list[str], read: Callable[[], Any]) -> Any:
    """Call `read`; turn any fault of the row into a one-line UserError."""
    try:
        return read()
    except KeyError as error:
        name = str(error.args[0]) if error.args else "?"
        if name in columns:
            raise UserError(f"{place}: KeyError: {name}") from error
        raise UserError(f"{place}: {_no_column(name, columns)}") from error
    except ODD as error:
        raise UserError(
            f"{place}: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def _no_column(name: str, columns: list[str]) -> str:
    return f"no column {name!r}; there are: {', '.join(columns)}"
