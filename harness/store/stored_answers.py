"""The answers of a stored run, read from its journal: what was asked, what was said, what it scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from espalier.harness.errors import UserError, unknown_name
from espalier.harness.store import RunDir, Store, Unreadable

#: Identity of a sample inside a run: (task, doc id).
Key = tuple[str, int]

#: How many runs an error line names.
NAMED = 5


@dataclass(frozen=True)
class Said:
    """One answer.

    Attributes:
        answer: what was scored.
        asked: question, target and references of media; empty in journals of earlier versions.
        score: of this sample alone, None where the metric has none.
        share: the sample's contribution to the metric, None where it has none.
        unit: the first sample of its unit of statistics.
    """

    key: Key
    answer: str
    asked: Mapping[str, Any]
    score: float | None
    share: float | None
    unit: Key

    @property
    def name(self) -> str:
        """`task/document`."""
        return f"{self.key[0]}/{self.key[1]}"


@dataclass(frozen=True)
class Told:
    """A finished run with its answers under one metric.

    Attributes:
        row: as it is stored.
        metric: whose scores the answers have.
        higher: whether more of it is better.
        answers: of scored samples, in the order of the benchmark.
    """

    row: Mapping[str, Any]
    metric: str
    higher: bool
    answers: Mapping[Key, Said] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the run is called in tables."""
        label = self.row["extra"].get("label")
        return " ".join(filter(None, (self.row["method"], label, f"{self.row['ratio']:g}")))

    @property
    def full_marks(self) -> float:
        """The best score that a sample can have.

        Raises:
            UserError: samples have no scores of their own, or the metric has no best.
        """
        scores = [one.score for one in self.answers.values()]
        known = [score for score in scores if score is not None]
        if not known or len(known) < len(scores):
            raise UserError(
                f"{self.metric} of run {self.row['run_key'][:12]} has no scores of single samples; "
                f"valid for --metric: {', '.join(self._scored()) or 'none'}"
            )
        if not self.higher:
            return 0.0
        most = max(known)
        if most > 100 or min(known) < 0:
            raise UserError(
                f"{self.metric} has no best score, a sample has {most:g}; valid: --against, or another --metric"
            )
        return 1.0 if most <= 1 else 100.0

    def _scored(self) -> list[str]:
        how = self.row["extra"].get("aggregation", {})
        return [name for name in self.row["metrics"] if how.get(name, {}).get("how") == "mean"]


def find_run(store: Path, prefix: str) -> RunDir:
    """Return the run whose key starts with `prefix`.

    Raises:
        UserError: no finished run does, or several do.
    """
    finished = {run.path.name: run for run in Store(store).folders()}
    if prefix in finished:
        return finished[prefix]
    found = sorted(key for key in finished if prefix and key.startswith(prefix))
    if not found:
        raise UserError(
            f"key={prefix!r}: no finished run of {len(finished)} in store={str(store)!r} starts so; "
            f"valid: {_some(sorted(finished)) or 'none'}"
        )
    if len(found) > 1:
        raise UserError(f"key={prefix!r} is the beginning of {len(found)} runs: {_some(found)}")
    return finished[found[0]]


def read_told(run: RunDir, metric: str | None = None) -> Told:
    """Return the answers of a finished run with their scores under a metric (None: its headline).

    Raises:
        UserError: the row cannot be read, has no such metric, or its journal holds no scored answers.
    """
    row = run.row()
    if row is None:
        raise Unreadable(f"store: {run.path} holds no finished run")
    headline = str(row["extra"].get("headline"))
    metrics = row.get("metrics", {})
    name = metric or headline
    if name not in metrics:
        raise unknown_name("--metric", name, metrics)
    how = row["extra"].get("aggregation", {}).get(name, {}).get("how", "mean")
    answers, scores = dict[Key, Mapping[str, Any]](), dict[Key, Mapping[str, Any]]()
    for entry in run.journal.entries():
        key = (entry.get("task"), entry.get("doc_id"))
        if isinstance(key[0], str) and isinstance(key[1], int):
            if isinstance(entry.get("answer"), str):
                # As a run takes them up again: the first answer and the last scoring count.
                answers.setdefault((key[0], key[1]), entry)
            if isinstance(entry.get("scores"), Mapping):
                scores[key[0], key[1]] = entry
    found = {
        key: _said(key, answers[key], scores[key], name, how == "mean")
        for key in sorted(answers)
        if key in scores
    }
    if how != "once":
        # A metric of some of the samples, as the accuracy on one kind of question.
        found = {key: one for key, one in found.items() if (one.score, one.share) != (None, None)}
    if not found:
        raise UserError(f"run {run.path.name[:12]}: its journal holds no answers scored by {name}")
    better = bool(row["extra"].get("higher_is_better", True)) if name == headline else True
    return Told(row, name, better, found)


def _said(
    key: Key, answer: Mapping[str, Any], scoring: Mapping[str, Any], metric: str, mean: bool
) -> Said:
    share = _number(scoring["scores"].get(metric))
    given = [one for one in scoring.get("values", ()) if metric in one.get("of", ())]
    own = _number(scoring.get("own", {}).get(metric))
    if own is None:
        own = _number(given[0].get("value")) if given else share if mean else None
    unit = scoring.get("units", {}).get(metric, key[1])
    asked = answer.get("asked")
    return Said(
        key,
        answer["answer"],
        asked if isinstance(asked, Mapping) else {},
        own,
        share,
        (key[0], unit),
    )


def _number(value: Any) -> float | None:
    """Return a number, or the one that a table has under `score`."""
    if isinstance(value, Mapping):
        value = value.get("score")
    return float(value) if isinstance(value, int | float) else None


def _some(keys: list[str]) -> str:
    more = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
    return ", ".join(key[:12] for key in keys[:NAMED]) + more
