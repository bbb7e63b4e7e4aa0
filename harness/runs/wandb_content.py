"""Content logged to Weights & Biases: progress, metrics, answers, pictures and the row of a run; rows of a sweep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import wandb
from PIL import Image

from espalier.harness.reports.curves.terminal_tables import latency_gains
from espalier.harness.store import RunDir

if TYPE_CHECKING:
    from espalier.harness.runs.sample_pictures import SamplePicture

#: Artifact type of a row.
ARTIFACT = "row"

COLUMNS = ("task", "doc_id", "question", "target", "answer")


#: Columns of a comparison before the metrics' own, by the block and the name in a row.
COMPARED = (
    *(
        (None, name)
        for name in ("model", "method", "variant", "benchmark", "ratio", "keep", "n_samples")
    ),
    *(("tokens", "kept_final"), ("flops", "share_of_full")),
    *(("time", "prefill_ms"), ("time", "decode_ms_per_token"), ("memory", "kv_bytes")),
)


def history(
    row: Mapping[str, Any],
    entries: Iterable[Mapping[str, Any]],
    samples: int,
    pictures: Sequence[SamplePicture] = (),
) -> dict[str, Any]:
    """Return the step of a row: metrics, their errors and bar chart, at most `samples` answers, and pictures."""
    metrics = {name: values["value"] for name, values in row["metrics"].items()}
    # First: a clocked run is made to measure it.
    step: dict[str, Any] = {f"gain/{phase}": gain for phase, gain in latency_gains(row).items()}
    step |= {f"metrics/{name}": value for name, value in metrics.items()}
    errors = {name: values.get("stderr") for name, values in row["metrics"].items()}
    step |= {f"stderr/{name}": value for name, value in errors.items() if value is not None}
    images = []
    for picture in pictures:
        if picture.drawing is not None:
            file = BytesIO()
            picture.drawing.savefig(file, format="png", bbox_inches="tight")
            images.append(wandb.Image(Image.open(file), caption=picture.file))
    if images:
        step["pictures"] = images
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


def comparison(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Return a wandb table with a line for each row: its cell, its headline with the standard error, and its cost."""
    lines = []
    for row in rows:
        headline = row["extra"]["headline"]
        values = row["metrics"].get(headline) or {}
        cells = ((row.get(block) or {} if block else row).get(name) for block, name in COMPARED)
        label = row["extra"].get("label")
        lines.append([*cells, label, headline, values.get("value"), values.get("stderr")])
    columns = [f"{block}/{name}" if block else name for block, name in COMPARED]
    names = [*columns, "label", "metric", "value", "stderr"]
    return wandb.Table(columns=names, data=lines, allow_mixed_types=True)


def artifact(directory: RunDir) -> Any:
    """Return the files of a run from which its row can be restored."""
    row_artifact = wandb.Artifact(f"row-{directory.path.name}", type=ARTIFACT)
    for name in ("row.json", "spec.json"):
        if (directory.path / name).is_file():
            row_artifact.add_file(str(directory.path / name), name=name)
    return row_artifact
