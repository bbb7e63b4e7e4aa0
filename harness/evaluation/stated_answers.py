"""Strict reading of answers: which option, which of yes and no, or whether an answer states anything.

A strict reader (harness/evaluation/scoring/choices.py) precedes the task's rules, which take hedges and letters in
words for options, or miss forms; the task's own reading gives further metrics. Short answers keep the task's score.
`unparsed` is the share of answers that state nothing clearly; they are wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

from lmms_eval.api.metrics import mean
from lmms_eval.api.task import Task

from espalier.harness.errors import UserError
from espalier.harness.evaluation.samples import Sample
from espalier.harness.evaluation.scoring.choices import (
    is_brief,
    is_legible,
    letter,
    lettered,
    yes_or_no,
)
from espalier.harness.specs.benchmark_spec import Answers, BenchmarkSpec
from espalier.harness.specs.comparable import grouped
from espalier.harness.store.answer_digest import Key

#: Suffix of metrics by the task's own reading.
OWN = "_lmms_eval"
UNPARSED = "unparsed"

#: Letters of options that no column names.
LETTERS = "ABCD"

#: Targets of questions with a closed set of answers.
YES_NO_TARGET = re.compile(r"(?i:yes|no)\.?")
LETTER_TARGET = re.compile(r"\(?([A-J])\)?\.?")

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
        renamed = _renamed if answers.form != "short" else lambda table: {}
        task._aggregation_list = {**metrics, **renamed(metrics), UNPARSED: mean}
        task._higher_is_better = {**better, **renamed(better), UNPARSED: False}


def strict_scoring(score: Score, answers: Answers | None) -> Score:
    """Return a task's scoring by strict reading, with its own reading and `unparsed` added."""
    return score if answers is None else partial(_scored, score, answers)


def count_unread(samples: Iterable[Sample]) -> int:
    """Return how many answers state nothing, where no task tells.

    Where all targets of a task are letters, or yes and no, an answer has to state one; others have to be legible.
    """
    by_task = grouped((sample.task, sample) for sample in samples)
    return sum(map(_count_unread, by_task.values()))


def _count_unread(samples: Sequence[Sample]) -> int:
    """Return the count of one task."""
    reads = _reader([(sample.context or {}).get("target") for sample in samples])
    return sum(not reads(sample.scored) for sample in samples)


def _reader(targets: Sequence[Any]) -> Callable[[str], Any]:
    """Return what reads the answers to questions with these targets."""
    texts = [target.strip() for target in targets if isinstance(target, str)]
    letters = [match[1] for match in map(LETTER_TARGET.fullmatch, texts) if match]
    if len(texts) < len(targets):
        return is_legible
    if len(letters) == len(texts):
        last = max([*letters, LETTERS[-1]])
        return partial(letter, options=[chr(code) for code in range(ord("A"), ord(last) + 1)])
    return yes_or_no if all(map(YES_NO_TARGET.fullmatch, texts)) else is_legible


def _scored(
    score: Score, answers: Answers, doc: Mapping[str, Any], results: Sequence[Any], **options: Any
) -> Mapping[str, Any]:
    answer, *verdicts = results
    if answers.form == "short":
        metrics = score(doc, results, **options)
        right = any(isinstance(value, Real) and float(value) > 0 for value in metrics.values())
        return {**metrics, UNPARSED: float(not right and not is_brief(str(answer)))}
    text = answer if isinstance(answer, str) else ""
    is_closed = answers.form == "yes_no"
    stated = yes_or_no(text) if is_closed else letter(text, _options(answers.options, doc))
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


class RunningScore:
    """Scores each answer by its task, as soon as it is there.

    Args:
        tasks: of the benchmark, as loaded.
        benchmark: names the headline. With a judge nothing is scored: it answers at the end.
    """

    def __init__(self, tasks: Sequence[Task], benchmark: BenchmarkSpec) -> None:
        scored = () if "judge" in benchmark.needs else tasks
        self._score: dict[str, Callable[..., Mapping[str, Any]]] = {
            task.config.task: strict_scoring(
                partial(type(task).process_results, task), benchmark.answers
            )
            for task in scored
        }
        self._task, _, self._metric = benchmark.headline.rpartition("/")
        self._values: dict[Key, float] = {}

    @property
    def value(self) -> float | None:
        """Mean of the headline metric over the samples so far; None where it is no mean of numbers, or one failed."""
        return sum(self._values.values()) / len(self._values) if self._values else None

    def add(self, samples: Iterable[Sample], document: Callable[[Sample], Any]) -> None:
        """Score samples; `document` returns the document of one."""
        for sample in samples:
            score = self._score.get(sample.task)
            if score is None or self._task not in ("", sample.task):
                continue
            try:
                value = score(document(sample), [sample.scored]).get(self._metric)
            except Exception:  # a task's scoring may raise anything; the end of the run reports it
                self._score.clear()  # a mean without this sample would be no mean of the answers
                self._values.clear()
                return
            if isinstance(value, Real):
                self._values[sample.key] = float(value)
