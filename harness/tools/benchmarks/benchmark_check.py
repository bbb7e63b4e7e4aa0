"""Check whether a benchmark can run here: read its data, answer samples with a small model, score the answers."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lmms_eval.api.task import Task

from espalier.harness.config.build_spec import specs_of
from espalier.harness.cost.facts import ModelFacts, StackFacts
from espalier.harness.engine.signals.table import SIGNALS
from espalier.harness.errors import UserError
from espalier.harness.evaluation.data_sources import AllowedSources
from espalier.harness.evaluation.evaluate import SampleErrors, evaluate, open_benchmark
from espalier.harness.evaluation.lmms_tasks import LoadedBenchmark, quiet
from espalier.harness.evaluation.prompt_text import chat_of
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.models.chat_media import media_of
from espalier.harness.ranks import without_launcher
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.run_spec import ModelSpec, RunSpec, VideoSpec
from espalier.harness.store import Store
from espalier.harness.tools.benchmarks.checkpoint_prompts import same_tokens, whole_checkpoint
from espalier.harness.tools.doctor.machine_report import Finding, NotHere, examine

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
    benchmark: BenchmarkSpec, task: Task, score: bool, borders: AllowedSources | None = None
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
    place: str,
    task: Task,
    number: int,
    columns: list[str],
    score: bool,
    borders: AllowedSources | None,
) -> RowSummary:
    # Pictures of a data set are decoded here.
    doc = _read_checked(place, columns, lambda: task.eval_docs[number])
    messages = _read_checked(place, columns, lambda: task.doc_to_messages(doc))
    try:
        chat = chat_of(messages)
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


#: The embedded model's context is 512 tokens, and each of its pictures takes 144; this many are left for an answer.
ROOM = 512 - 16
PICTURE = 144

#: Bytes are its tokens, so any text will do; videos become at most four frames of a few tokens.
VIDEO = ModelSpec(
    name="tiny_video",
    adapter="qwen2_vl",
    path=None,
    hub=None,
    revision=None,
    dtype="float32",
    attention="sdpa",
    weights="random",
    device="cpu",
    processor={
        "min_pixels": 14 * 14,
        "max_pixels": 56 * 56,
        "video_min_pixels": 14 * 14,
        "video_max_pixels": 56 * 56,
    },
    video=VideoSpec(frames=4),
    architecture={
        "text": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1.0e4,
                "mrope_section": [1, 1, 2],
            },
        },
        "vision": {"patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2},
    },
    facts=ModelFacts(
        text=StackFacts(2, 32, 48, 4, 2, 8, gated=True, causal=True),
        tower=StackFacts(2, 32, 64, 4, 4, 8, gated=False, causal=False),
        stem=None,
        projector=(128, 128, 32),
        vocabulary=288,
        visual_tokens=16,
        class_attention="mean",
        rotary_axes=3,
        signals=frozenset(SIGNALS),
    ),
)


#: Samples to answer for each task of a group.
SAMPLES = 2

#: Tokens of an answer; its content does not matter.
STEPS = 8


@dataclass
class Examination:
    """The steps of a check, with the results that later steps need.

    Args:
        spec: of a run of the benchmark on the embedded model.
        user_spec: of a run on the model that the user names; None: no model is named.
    """

    spec: RunSpec
    user_spec: RunSpec | None = None
    loaded: LoadedBenchmark | None = None
    summaries: list[RowSummary] = field(default_factory=list)
    prompt: str | None = None

    def steps(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yield the steps in order; after a failure only the checkpoint's still make sense."""
        yield "data", self.data
        yield "rows", self.rows
        yield "answers", self.answers
        if self.user_spec is not None:
            yield "checkpoint", self.checkpoint
            yield "tokens", self.tokens

    def data(self) -> str:
        """Load the data set from the cache or from `benchmark.path`."""
        dataset = self.spec.benchmark.dataset
        self.loaded = open_benchmark(self.spec)
        places = sorted({str(task.config.dataset_path) for task in self.loaded.tasks})
        rows = sum(len(task.eval_docs) for task in self.loaded.tasks)
        place = dataset.path or ", ".join(places)
        summary = (
            f"{place}, split {self.loaded.tasks[0].config.test_split or dataset.split}: {rows} rows"
        )
        if dataset.samples is not None and rows != dataset.samples:
            summary += f" (the benchmark's file states {dataset.samples})"
        return summary

    def rows(self) -> str:
        """Read the first rows of each task."""
        assert self.loaded is not None
        benchmark = self.spec.benchmark
        # An empty answer is not worth a judge's request, and a timed benchmark has no score.
        score = "judge" not in benchmark.needs and benchmark.new_tokens is None
        with without_launcher(), quiet(), self.loaded.serving():
            self.summaries = [
                read_rows(benchmark, task, score, self.loaded.borders) for task in self.loaded.tasks
            ]
        return f"{sum(summary.rows for summary in self.summaries)} rows read; first: {self.summaries[0].first}"

    def answers(self) -> str:
        """Answer and score two samples of each task.

        Raises:
            NotHere: scoring needs something that this machine lacks.
            UserError: a sample cannot be answered or scored, or a metric is not a number.
        """
        needs = self.spec.benchmark.needs
        if "java" in needs and shutil.which("java") is None:
            raise NotHere("its scorer needs Java (a `java` on the PATH)")
        clips, pictures, words = (
            max(getattr(summary, name) for summary in self.summaries)
            for name in ("clips", "pictures", "words")
        )
        # The embedded model sees no videos.
        fits = not clips and pictures > 0 and pictures * PICTURE + words < ROOM
        adapter = load_adapter(self.spec.model if fits else VIDEO)
        with TemporaryDirectory() as folder:
            spec = replace(self.spec, model=adapter.spec, store=Path(folder))
            journal = Store(spec.store).run("check").journal
            try:
                done = evaluate(
                    spec, adapter, build_method("none", {}), journal, loaded=self.loaded
                )
            except SampleErrors as error:
                raise UserError(" ".join(str(error).split())) from error
            except UserError as error:
                if "judge" in needs and "judge" in str(error):
                    raise NotHere(str(error)) from error
                raise
        self.prompt = done.prompt.get("rendered")
        values = {name: metric["value"] for name, metric in done.metrics.items()}
        broken = [name for name, value in values.items() if value is not None and math.isnan(value)]
        if broken:
            raise UserError(f"metrics that are no number: {', '.join(broken)}")
        scored = ", ".join(
            f"{name} {value:g}" for name, value in values.items() if value is not None
        )
        return f"{done.n_samples} samples by {adapter.spec.name} (not a result): {scored or 'no metric has a value'}"

    def checkpoint(self) -> str:
        """Check that the named model's checkpoint is here and complete."""
        assert self.user_spec is not None
        return whole_checkpoint(self.user_spec)

    def tokens(self) -> str:
        """Compare the prompts' token ids and template with those of the originals."""
        assert self.user_spec is not None
        # The model's own family may word the task's prompts.
        summary, self.prompt = same_tokens(self.user_spec, open_benchmark(self.user_spec))
        return summary


def check(
    name: str, path: Path | None = None, overrides: Sequence[str] = ()
) -> tuple[list[Finding], str | None]:
    """Return the findings of all steps, and the prompt of the first answered sample.

    Args:
        name: as after `benchmark=`.
        path: replaces `benchmark.path`.
        overrides: of a run, for example `model=llava15_7b`: that model's checkpoint is checked too.

    Raises:
        UserError: there is no such benchmark, or an override is wrong.
    """
    place = [] if path is None else [f"benchmark.path={path}"]
    chosen = any(override.startswith("model=") for override in overrides)
    embedded = [override for override in overrides if not override.startswith("model")]
    examination = Examination(
        _spec([f"benchmark={name}", *place, *embedded]),
        _spec([f"benchmark={name}", *place, *overrides]) if chosen else None,
    )
    findings: list[Finding] = []
    for step, look in examination.steps():
        if step not in ("data", "checkpoint") and findings[-1].status == "failed":
            continue
        findings.append(examine(step, look))
    return findings, examination.prompt


def _spec(overrides: Sequence[str]) -> RunSpec:
    return specs_of(
        "method=none",
        f"limit={SAMPLES}",
        "engine.paired=0",
        "engine.warmup=0",
        "engine.batch_size=1",
        f"++benchmark.generation.max_new_tokens={STEPS}",
        *overrides,
    )[0]
