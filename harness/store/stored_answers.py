"""The answers of a stored run, read from its journal, with questions and scores."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from espalier.harness.errors import UserError
from espalier.harness.settings import choice
from espalier.harness.store import RunDir, Store, Unreadable
from espalier.harness.store.answer_digest import Key
from espalier.harness.store.row_text import amount_text

#: Maximum number of runs in an error line.
NAMED = 5


@dataclass(frozen=True)
class StoredAnswer:
    """One answer.

    Attributes:
        answer: the text that was scored.
        prompt: question, target and references of media; empty in journals of earlier versions.
        score: of this sample alone, None if the metric has none.
        share: the sample's contribution to the metric, None if it has none.
        unit: the first sample of its unit of statistics.
    """

    key: Key
    answer: str
    prompt: Mapping[str, Any]
    score: float | None
    share: float | None
    unit: Key

    @property
    def name(self) -> str:
        """`task/document`."""
        return f"{self.key[0]}/{self.key[1]}"


def best_score(scores: Sequence[float], higher: bool) -> float | None:
    """Return the best score that a sample can have, by those of a metric; None: the metric has none."""
    if not higher:
        return 0.0
    highest = max(scores)
    if highest > 100 or min(scores) < 0:
        return None
    return 1.0 if highest <= 1 else 100.0


@dataclass(frozen=True)
class AnsweredRun:
    """A finished run with its answers under one metric.

    Attributes:
        row: as stored.
        metric: name of the metric.
        higher: whether a higher score is better.
        answers: of scored samples, in the order of the benchmark.
    """

    row: Mapping[str, Any]
    metric: str
    higher: bool
    answers: Mapping[Key, StoredAnswer] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the run in tables."""
        label = self.row["extra"].get("label")
        amount = amount_text(self.row["ratio"], self.row.get("keep"))
        return " ".join(filter(None, (self.row["method"], label, amount)))

    @property
    def full_marks(self) -> float:
        """The best score that a sample can have.

        Raises:
            UserError: samples have no scores, or the metric has no maximum.
        """
        scores = [answer.score for answer in self.answers.values()]
        numbers = [score for score in scores if score is not None]
        if not numbers or len(numbers) < len(scores):
            raise UserError(
                f"{self.metric} of run {self.row['run_key'][:12]} has no scores of single samples; "
                f"valid for --metric: {', '.join(self._sample_metrics()) or 'none'}"
            )
        best = best_score(numbers, self.higher)
        if best is None:
            raise UserError(
                f"{self.metric} has no best score, a sample has {max(numbers):g}; valid: --against, or another --metric"
            )
        return best

    def _sample_metrics(self) -> list[str]:
        aggregation = self.row["extra"].get("aggregation", {})
        return [
            name for name in self.row["metrics"] if aggregation.get(name, {}).get("how") == "mean"
        ]


def find_run(store: Path, prefix: str) -> RunDir:
    """Return the run with a key that starts with `prefix`.

    Raises:
        UserError: no finished run matches, or several do.
    """
    finished = {run.path.name: run for run in Store(store).folders()}
    return finished[find_key(finished, prefix, store, "finished ")]


def find_key(keys: Collection[str], prefix: str, store: Path, kind: str = "") -> str:
    """Return the key of a store that starts with `prefix`.

    Raises:
        UserError: no key matches, or several do.
    """
    if prefix in keys:
        return prefix
    matches = sorted(key for key in keys if prefix and key.startswith(prefix))
    if not matches:
        raise UserError(
            f"key={prefix!r}: no {kind}run of {len(keys)} in store={str(store)!r} starts so; "
            f"valid: {_first_keys(sorted(keys)) or 'none'}"
        )
    if len(matches) > 1:
        raise UserError(
            f"key={prefix!r} is the beginning of {len(matches)} runs: {_first_keys(matches)}"
        )
    return matches[0]


def finished_row(run: RunDir) -> dict[str, Any]:
    """Return the row of a run; raise Unreadable if it has none or it is damaged."""
    row = run.row()
    if row is None:
        raise Unreadable(f"store: {run.path} holds no finished run")
    return row


def read_answers(run: RunDir, metric: str | None = None) -> AnsweredRun:
    """Return the answers of a finished run with their scores under a metric (None: its headline).

    Raises:
        UserError: the row cannot be read, has no such metric, or its journal holds no scored answers.
    """
    row = finished_row(run)
    headline = str(row["extra"].get("headline"))
    metrics = row.get("metrics", {})
    name = metric or headline
    choice("--metric", name, metrics)
    aggregation = row["extra"].get("aggregation", {}).get(name, {}).get("how", "mean")
    answers, scores = dict[Key, Mapping[str, Any]](), dict[Key, Mapping[str, Any]]()
    for entry in run.journal.entries():
        key = (entry.get("task"), entry.get("doc_id"))
        if isinstance(key[0], str) and isinstance(key[1], int):
            if isinstance(entry.get("answer"), str):
                # As when a run is resumed: the first answer and the last scoring count.
                answers.setdefault((key[0], key[1]), entry)
            if isinstance(entry.get("scores"), Mapping):
                scores[key[0], key[1]] = entry
    scored_answers = {
        key: _stored_answer(key, answers[key], scores[key], name, aggregation == "mean")
        for key in sorted(answers)
        if key in scores
    }
    if aggregation != "once":
        # A metric of a subset of samples, such as the accuracy on one question type.
        scored_answers = {
            key: answer
            for key, answer in scored_answers.items()
            if (answer.score, answer.share) != (None, None)
        }
    if not scored_answers:
        raise UserError(f"run {run.path.name[:12]}: its journal holds no answers scored by {name}")
    better = bool(row["extra"].get("higher_is_better", True)) if name == headline else True
    return AnsweredRun(row, name, better, scored_answers)


def _stored_answer(
    key: Key, answer: Mapping[str, Any], scoring: Mapping[str, Any], metric: str, mean: bool
) -> StoredAnswer:
    share = _number(scoring["scores"].get(metric))
    values = [value for value in scoring.get("values", ()) if metric in value.get("of", ())]
    score = _number(scoring.get("own", {}).get(metric))
    if score is None:
        score = _number(values[0].get("value")) if values else share if mean else None
    unit = scoring.get("units", {}).get(metric, key[1])
    prompt = answer.get("asked")
    return StoredAnswer(
        key,
        answer["answer"],
        prompt if isinstance(prompt, Mapping) else {},
        score,
        share,
        (key[0], unit),
    )


def _number(value: Any) -> float | None:
    """Return a number, or the value of a table under `score`."""
    if isinstance(value, Mapping):
        value = value.get("score")
    return float(value) if isinstance(value, int | float) else None


def _first_keys(keys: list[str]) -> str:
    suffix = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
    return ", ".join(key[:12] for key in keys[:NAMED]) + suffix
