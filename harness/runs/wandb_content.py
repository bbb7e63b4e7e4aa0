"""Content logged to Weights & Biases: progress, metrics, answers, pictures and the row of a run; rows of a sweep."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import wandb
from PIL import Image

from espalier.harness.errors import UserError, plain
from espalier.harness.evaluation.samples import Key, SampleErrors
from espalier.harness.evaluation.stated_answers import RunningScore
from espalier.harness.reports.curves.terminal_tables import latency_gains
from espalier.harness.runs.wandb_log import Mirror
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.store import RunDir
from espalier.harness.store.stored_answers import best_score

if TYPE_CHECKING:
    from espalier.harness.evaluation.evaluate import Evaluation
    from espalier.harness.evaluation.task_cache import TaskCache
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.runs.admission import Job
    from espalier.harness.runs.sample_pictures import SamplePicture

#: Artifact type of a row, and the files of the run folder in it.
ARTIFACT = "row"
FILES = ("row.json", "spec.json")

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
    for name in FILES:
        if (directory.path / name).is_file():
            row_artifact.add_file(str(directory.path / name), name=name)
    return row_artifact


#: Called with the finished and all samples.
Progress = Callable[[int, int], None]


class Watch:
    """Feeds the mirror of a run.

    Args:
        mirror: opened here.
        tasks: of the benchmark.
        benchmark: names the headline.
    """

    def __init__(self, mirror: Mirror, tasks: Sequence[Any], benchmark: BenchmarkSpec) -> None:
        self._mirror = mirror
        self.running = RunningScore(tasks, benchmark)
        mirror.begin()

    def progress(self, progress: Progress) -> Progress:
        """Return a function that calls `progress`, and logs."""

        def report(finished: int, total: int) -> None:
            progress(finished, total)
            self._mirror.progress(finished, total, self.running.value)

        return report

    def draw(self, job: Job, adapter: Adapter, evaluation: Evaluation, shelf: TaskCache) -> None:
        """Draw the samples without full marks for the mirror, `log.pictures` of them, the worst first."""
        count, benchmark = job.spec.log_pictures, job.spec.benchmark
        if not count or benchmark.prompt_tokens is not None:
            return
        # It loads matplotlib.
        from espalier.harness.runs.sample_pictures import draw_samples

        try:
            worst = worst_samples(evaluation, benchmark)[:count]
            pictures = draw_samples(job.spec, job.method, adapter, worst, shelf)
            self._mirror.pictures = sorted(pictures, key=lambda picture: worst.index(picture.key))
        except (UserError, SampleErrors) as error:
            print(f"log=wandb: no pictures of run {job.key}: {plain(str(error))}", file=sys.stderr)


def worst_samples(evaluation: Evaluation, benchmark: BenchmarkSpec) -> list[Key]:
    """Return the samples without full marks in the headline, the worst first, and in the order of the benchmark."""
    sign = 1 if benchmark.higher_is_better else -1
    name = benchmark.headline
    scores = {
        sample.key: evaluation.scores.get(sample.key, {}).get(name, 0.0)
        for sample in evaluation.samples
    }
    best = best_score([*scores.values()], benchmark.higher_is_better) if scores else None
    wrong_keys = (key for key, score in scores.items() if score != best)
    return sorted(wrong_keys, key=lambda key: (sign * scores[key], key))
