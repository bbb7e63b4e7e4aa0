"""Error lines that name data set, split and row of data that a task cannot use."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from lmms_eval.api.task import Task, TaskConfig

from espalier.harness.errors import UserError
from espalier.harness.evaluation.samples import SampleErrors

#: Columns that hold references, besides the column that a task calls its target.
REFERENCES = ("answer", "answers")

#: The metric that only writes answers for a server, and needs no references.
SUBMISSION = "submission"


def origin(config: TaskConfig) -> str:
    """Return the origin of a task's samples, for an error line."""
    name = f", configuration {config.dataset_name!r}" if config.dataset_name else ""
    split = config.test_split or config.validation_split
    return f"data set {config.dataset_path!r}{name}, split {split!r}"


def cause_of(error: BaseException) -> str:
    """Return type and first line of the first error of a chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def lacks_locks(error: BaseException | None) -> bool:
    """Return whether a chain of errors has an OSError of a file system without locks, such as NFS without lockd."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOLCK, errno.ENOTSUP):
            return True
        error = error.__cause__ or error.__context__
    return False


def damaged_file(folder: Path) -> str:
    """Return the start of an error line about a folder's first unreadable parquet file; "" if there is none."""
    for file in sorted(folder.rglob("*.parquet")):
        try:
            pq.read_metadata(file)
        except (pa.ArrowInvalid, OSError):
            return f"file {file.relative_to(folder).as_posix()!r} is damaged: "
    return ""


def check_references(tasks: Sequence[Task], limit: int | None) -> None:
    """Raise UserError if a sample has no reference: scorers would count any answer as wrong.

    Cost: one pass over one or two columns.
    """
    for task in tasks:
        docs = task.test_docs() if task.has_test_docs() else task.validation_docs()
        target = task.config.doc_to_target
        names = {*REFERENCES, *((target,) if isinstance(target, str) else ())}
        if set(task.aggregation()) == {SUBMISSION}:
            continue
        for name in sorted(names & set(docs.column_names)):
            for row, value in enumerate(docs.with_format(None).select_columns([name])):
                if limit is not None and row >= limit:
                    break
                if value[name] is None:
                    raise UserError(
                        f"benchmark.task={task.config.task!r}: {origin(task.config)}, row {row}: "
                        f"column {name!r} is empty, so that no answer could be scored"
                    )


def guard_targets(task: Task) -> None:
    """Make `task.doc_to_target`, which lmms-eval calls for each logged sample, name the row that it cannot read."""
    read = type(task).doc_to_target

    @wraps(read)
    def guarded(doc: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        try:
            return read(task, doc, *args, **options)
        except Exception as error:  # a task's function may raise anything
            raise UserError(
                f"benchmark.task={task.config.task!r}: {origin(task.config)}{_row(task, doc)}: "
                f"its target cannot be read: {cause_of(error)}"
            ) from error

    task.doc_to_target = guarded


@contextmanager
def named_data(tasks: Sequence[Task]) -> Iterator[None]:
    """Add to the error about failed samples the data set and split that `task/row` refers to."""
    try:
        yield
    except SampleErrors as error:
        names = dict.fromkeys(failure.task for failure in error.failures)
        origins = {task.config.task: origin(task.config) for task in tasks}
        where = "; ".join(
            f"{name}/<row> is of {origins[name]}" for name in names if name in origins
        )
        raise SampleErrors(error.failures, error.total, where) from error


def _row(task: Task, doc: Mapping[str, Any]) -> str:
    docs = task.eval_docs_no_media
    columns = set(docs.column_names)
    sought = {name: value for name, value in doc.items() if name in columns}
    rows = (f", row {row}" for row, document in enumerate(docs) if document == sought)
    return next(rows, "")
