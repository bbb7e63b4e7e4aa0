"""Check whether a benchmark can run here: read its data, answer samples with a small model, score the answers."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.errors import UserError
from espalier.harness.evaluation.evaluate import SampleErrors, evaluate, open_benchmark
from espalier.harness.evaluation.lmms_tasks import Loaded, quiet
from espalier.harness.ranks import alone
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import Store
from espalier.harness.tools.benchmarks.checkpoint_prompts import same_tokens, whole_checkpoint
from espalier.harness.tools.benchmarks.dataset_rows import RowSummary, read_rows
from espalier.harness.tools.benchmarks.tiny_models import answers
from espalier.harness.tools.doctor.findings import Finding, NotHere, examine

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
    loaded: Loaded | None = None
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
            summary += f" (the benchmark's file says {dataset.samples})"
        return summary

    def rows(self) -> str:
        """Read the first rows of each task."""
        assert self.loaded is not None
        benchmark = self.spec.benchmark
        # An empty answer is not worth a judge's request, and a timed benchmark has no score.
        score = "judge" not in benchmark.needs and benchmark.new_tokens is None
        with alone(), quiet(), self.loaded.serving():
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
        adapter = answers(
            self.spec,
            max(summary.clips for summary in self.summaries),
            max(summary.pictures for summary in self.summaries),
            max(summary.words for summary in self.summaries),
        )
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
    command = read_command(
        [
            "method=none",
            f"limit={SAMPLES}",
            "engine.paired=0",
            "engine.warmup=0",
            "engine.batch_size=1",
            f"++benchmark.generation.max_new_tokens={STEPS}",
            *overrides,
        ]
    )
    assert command is not None  # none of these asks for help
    return build_spec(command.cells[0])
