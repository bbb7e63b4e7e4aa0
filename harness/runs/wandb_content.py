"""What Weights & Biases is told of a committed run: metrics, a picture of them, answers, and the row itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import wandb

from espalier.harness.store import RunDir

#: Type of the artifact that a row is, and the files of a run folder that it holds.
ARTIFACT = "row"
FILES = ("row.json", "spec.json")

COLUMNS = ("task", "doc_id", "question", "target", "answer")


def history(
    row: Mapping[str, Any], entries: Iterable[Mapping[str, Any]], samples: int
) -> dict[str, Any]:
    """Return the one step that is logged: metrics, bars of them, and at most `samples` answers with their scores."""
    metrics = {name: values["value"] for name, values in row["metrics"].items()}
    told: dict[str, Any] = {f"metrics/{name}": value for name, value in metrics.items()}
    known = [[name, value] for name, value in metrics.items() if value is not None]
    if known:
        bars = wandb.Table(columns=["metric", "value"], data=known)
        told["plots/metrics"] = wandb.plot.bar(bars, "metric", "value", title=row["benchmark"])
    if samples:
        told["samples"] = answers(entries, samples)
    return told


def answers(entries: Iterable[Mapping[str, Any]], most: int) -> Any:
    """Return a wandb table of the first answers of a journal, with what each contributes to the metrics."""
    found: dict[tuple[str, int], Mapping[str, Any]] = {}
    scores: dict[tuple[str, int], Mapping[str, float]] = {}
    for entry in entries:
        key = (entry.get("task", ""), entry.get("doc_id", -1))
        if "answer" in entry:
            found.setdefault(key, entry)
        elif "scores" in entry:
            scores[key] = entry["scores"]
    first = sorted(found)[:most]
    names = sorted({name for key in first for name in scores.get(key, {})})
    lines = []
    for key in first:
        asked = found[key].get("asked") or {}
        told = (asked.get("question"), asked.get("target"), found[key]["answer"])
        # A column of wandb holds one type.
        cells = [None if one is None else str(one) for one in told]
        lines.append([*key, *cells, *(scores.get(key, {}).get(name) for name in names)])
    return wandb.Table(columns=[*COLUMNS, *names], data=lines, allow_mixed_types=True)


def artifact(directory: RunDir) -> Any:
    """Return the files of a run from which its row can be put back."""
    found = wandb.Artifact(f"row-{directory.path.name}", type=ARTIFACT)
    for name in FILES:
        if (directory.path / name).is_file():
            found.add_file(str(directory.path / name), name=name)
    return found
