"""Content logged to Weights & Biases for a committed run: metrics, a bar chart, answers, and the row itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import wandb

from espalier.harness.store import RunDir

#: Artifact type of a row, and the files of the run folder in it.
ARTIFACT = "row"
FILES = ("row.json", "spec.json")

COLUMNS = ("task", "doc_id", "question", "target", "answer")


def history(
    row: Mapping[str, Any], entries: Iterable[Mapping[str, Any]], samples: int
) -> dict[str, Any]:
    """Return the single logged step: metrics, their bar chart, and at most `samples` answers with scores."""
    metrics = {name: values["value"] for name, values in row["metrics"].items()}
    step: dict[str, Any] = {f"metrics/{name}": value for name, value in metrics.items()}
    defined = [[name, value] for name, value in metrics.items() if value is not None]
    if defined:
        bars = wandb.Table(columns=["metric", "value"], data=defined)
        step["plots/metrics"] = wandb.plot.bar(bars, "metric", "value", title=row["benchmark"])
    if samples:
        step["samples"] = answers(entries, samples)
    return step


def answers(entries: Iterable[Mapping[str, Any]], limit: int) -> Any:
    """Return a wandb table of the first answers of a journal, with their contributions to the metrics."""
    answers_by_key: dict[tuple[str, int], Mapping[str, Any]] = {}
    scores: dict[tuple[str, int], Mapping[str, float]] = {}
    for entry in entries:
        key = (entry.get("task", ""), entry.get("doc_id", -1))
        if "answer" in entry:
            answers_by_key.setdefault(key, entry)
        elif "scores" in entry:
            scores[key] = entry["scores"]
    first = sorted(answers_by_key)[:limit]
    names = sorted({name for key in first for name in scores.get(key, {})})
    lines = []
    for key in first:
        request = answers_by_key[key].get("asked") or {}
        texts = (request.get("question"), request.get("target"), answers_by_key[key]["answer"])
        # All values of a wandb column must have one type.
        cells = [None if text is None else str(text) for text in texts]
        lines.append([*key, *cells, *(scores.get(key, {}).get(name) for name in names)])
    return wandb.Table(columns=[*COLUMNS, *names], data=lines, allow_mixed_types=True)


def artifact(directory: RunDir) -> Any:
    """Return the files of a run from which its row can be restored."""
    row_artifact = wandb.Artifact(f"row-{directory.path.name}", type=ARTIFACT)
    for name in FILES:
        if (directory.path / name).is_file():
            row_artifact.add_file(str(directory.path / name), name=name)
    return row_artifact
