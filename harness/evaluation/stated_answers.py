"""Strict reading of letter and yes/no answers, with the task's own reading as further metrics.

A strict reader (harness/evaluation/scoring/choices.py) precedes the task's rules, which take hedges and letters in
words for options, or miss forms. `unparsed` is the share of answers that state nothing clearly; they are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lmms_eval.api.task import Task

from espalier.harness.errors import UserError
from espalier.harness.evaluation.scoring.choices import letter, lettered, yes_or_no
from espalier.harness.specs.benchmark_spec import Answers

#: Suffix of metrics by the task's own reading.
OWN = "_lmms_eval"
UNPARSED = "unparsed"

#: Letters of options that no column names.
LETTERS = "ABCD"

Score = Callable[..., Mapping[str, Any]]


def add_statements(tasks: Sequence[Task], answers: Answers | None) -> None:
    """Add the metrics of strict reading to tasks; without `answers` they stay unchanged.

    Raises:
        UserError: a task lacks a column of options, or already has a metric `unparsed`.
    """
    if answers is None:
        return
    for task in tasks:
        name, metrics = task.config.task, task.aggregation()
        columns = getattr(task.eval_docs, "column_names", None) or answers.options
        for column in answers.options:
            if column not in columns:
                raise UserError(
                    f"benchmark.answers.options: {column!r} is not a column of {name}; "
                    f"valid: {', '.join(map(str, columns))}"
                )
        if UNPARSED in metrics:
            raise UserError(
                f"benchmark.answers={answers.form!r}: task {name} reads its answers itself; valid: null"
            )
        better = task.higher_is_better()
        task._aggregation_list = {**metrics, **_renamed(metrics), UNPARSED: _mean}
        task._higher_is_better = {**better, **_renamed(better), UNPARSED: False}


def strict_scoring(score: Score, answers: Answers | None) -> Score:
    """Return a task's scoring by strict reading, with its own reading and `unparsed` added."""
    return score if answers is None else partial(_scored, score, answers)


def statement(answers: Answers, doc: Mapping[str, Any], answer: str) -> str:
    """Return the letter, or yes or no, that an answer states; "" if it states none clearly."""
    if answers.form == "yes_no":
        return yes_or_no(answer)
    return letter(answer, _options(answers.options, doc))


def _scored(
    score: Score, answers: Answers, doc: Mapping[str, Any], results: Sequence[Any], **options: Any
) -> Mapping[str, Any]:
    answer, *verdicts = results
    stated = statement(answers, doc, answer if isinstance(answer, str) else "")
    metrics = score(doc, [stated, *verdicts], **options)
    return {**metrics, **_renamed(score(doc, results, **options)), UNPARSED: float(not stated)}


def _renamed(table: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}{OWN}": value for name, value in table.items()}


def _options(columns: Sequence[str], doc: Mapping[str, Any]) -> dict[str, str]:
    if not columns:
        return dict.fromkeys(LETTERS, "")
    texts = [doc[column] for column in columns]
    if len(columns) == 1 and isinstance(texts[0], list | tuple):
        texts = list(texts[0])
    return lettered(texts)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
