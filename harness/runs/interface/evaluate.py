"""Evaluate a method on a model and a benchmark from Python, as `python run.py` does: same key, row and store.

`evaluate` returns the stored row with its metrics and samples, and its comparison with another run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pandas as pd

from espalier.harness.api.argument_errors import user_errors
from espalier.harness.api.loaded_models import Model
from espalier.harness.api.open_method import refuse_calibrated, require_amount
from espalier.harness.api.run_request import (
    PLACES,
    Methods,
    parameter_key,
    parameters,
    read_method,
    read_request,
)
from espalier.harness.config.cell_settings import RUN_KEYS
from espalier.harness.errors import UserError
from espalier.harness.evaluation.journal_scores import read_scorings
from espalier.harness.evaluation.samples import finished_samples
from espalier.harness.models.weights_digest import weights_digest
from espalier.harness.ranks import Ranks
from espalier.harness.runs.admission import admit_here
from espalier.harness.runs.model_pool import Pool
from espalier.harness.runs.single_run import CellRunner
from espalier.harness.settings import read_section, setting_hints
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.comparable import amount
from espalier.harness.specs.hub_cache import restored_network
from espalier.harness.specs.records.data_file import is_data
from espalier.harness.specs.records.own_data import save_records
from espalier.harness.specs.records.record import RecordSettings
from espalier.harness.specs.run_spec import ModelSpec, RunSpec
from espalier.harness.stats import by_unit, mcnemar_midp, mean_interval
from espalier.harness.store import RunDir, Store
from espalier.harness.store.answer_view import (
    BROKE,
    MENDED,
    SAME,
    Comparison,
    compare,
    comparison_lines,
)
from espalier.harness.store.files.dataset_copies import cache_folder
from espalier.harness.store.files.digests import Digests
from espalier.harness.store.stored_answers import AnsweredRun, read_answers
from espalier.methods.base import Method

__all__ = ["EvaluatedRun", "evaluate"]

#: Keys of a command that a single run has no use for.
OF_COMMANDS = ("cluster", "curves", "grids", "json", "refused", "report")

#: What `evaluate` takes, besides hyper-parameters.
ARGUMENTS = (*(key for key in RUN_KEYS if key not in OF_COMMANDS), *PLACES)

#: Keys of sections, which a dotted key sets.
PARTS = {"model": tuple(setting_hints(ModelSpec)), "benchmark": tuple(setting_hints(BenchmarkSpec))}

#: What `benchmark` takes, in error lines.
BENCHMARKS = (
    "a name of conf/benchmark, the path of own data, a pandas frame, or a list of dictionaries"
)

#: A mean over samples may differ from the metric by rounding.
ROUNDING = 1e-9


def evaluate(
    model: str | PathLike[str] | Model,
    method: Methods,
    benchmark: str | PathLike[str] | pd.DataFrame | Sequence[Mapping[str, Any]],
    ratio: float | None = None,
    *,
    keep: int | str | None = None,
    limit: int | Literal["all"] | None = None,
    store: str | PathLike[str] | None = None,
    **settings: Any,
) -> EvaluatedRun:
    """Evaluate a method: `espalier.evaluate("seedling", "fastv", "seedling_vqa", ratio=0.9, limit=100).metrics`.

    A run by names is that of the command line: it has the same key and row, and is served from the store if it is
    finished. After an interruption the same call continues. A model in memory counts by a digest of its weights, a
    method of a notebook by its code.

    Args:
        model: a name of conf/model, or the result of `load` or `wrap`.
        method: a name of conf/method, an instance of your own class, or a list of two that drop tokens.
        benchmark: a name of conf/benchmark, or your own data: the path of a file or folder, a pandas frame or a list of
            dictionaries, with the columns of docs/own_data.md (image, question, answer, ...); `score`: how answers are
            scored.
        ratio: share of visual tokens removed, 0 <= ratio < 1; needed for every method that removes tokens.
        keep: number of visual tokens kept, or a share such as "10%", in place of `ratio`.
        limit: number of samples; None: the benchmark's own limit; "all": all.
        store: folder of results; None: as for commands.
        **settings: hyper-parameters of the method, and keys of the config by name (`seed`, `batch_size`, `compressor`,
            `judge`) or in full (`**{"model.dtype": "bfloat16"}`).

    Raises:
        UserError: one line with the argument, its value and what is valid.
        SampleErrors: samples failed; the others are kept.
    """
    values = {**settings, "ratio": ratio, "keep": keep, "limit": limit, "store": store}
    with ExitStack() as stack, user_errors():
        stack.enter_context(restored_network())
        method = read_method(method)
        config = _config_settings(method, benchmark, values)
        if limit == "all":
            config["limit"] = None
        request = read_request(model, method, config)
        spec = request.spec
        if isinstance(model, Model) and model.borrowed:
            spec = _in_memory(spec, model, request.method)
        job = admit_here(spec, Ranks(), Digests(), method=request.method)
        require_amount(job.spec, ratio, keep)
        pool = Pool()
        if isinstance(model, Model):
            open_spec = model.open_spec
            pool = Pool(lambda spec: stack.enter_context(open_spec(spec)))
        row, _ = CellRunner(argv=request.argv, pool=pool).run(job, [job])
    records = job.spec.benchmark.own_data()
    ids = () if records is None else [record.id for record in records.records]
    return EvaluatedRun(row, Store(job.spec.store).run(job.key).path, ids)


def _config_settings(
    method: str | Method,
    benchmark: str | PathLike[str] | pd.DataFrame | Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the arguments of `evaluate` by config key, without those that are None.

    Args:
        method: a name, or an instance.
        benchmark: a name, or records in memory.
        arguments: further arguments, by the names that `evaluate` takes.

    Raises:
        UserError: one line with the argument, its value and what is valid.
    """
    values = {name: value for name, value in arguments.items() if value is not None}
    settings = {_key(name, value, method): value for name, value in values.items()}
    return _benchmark_settings(benchmark, values) | settings


def _benchmark_settings(
    benchmark: str | PathLike[str] | pd.DataFrame | Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what chooses a benchmark; records in memory are written to the cache, as a file of the user."""
    if isinstance(benchmark, PathLike) or (isinstance(benchmark, str) and is_data(benchmark)):
        return {"benchmark": "data", "benchmark.path": benchmark}
    if isinstance(benchmark, str):
        return {"benchmark": benchmark}
    if isinstance(benchmark, bytes | Mapping) or not isinstance(benchmark, Iterable):
        raise UserError(f"benchmark is a {type(benchmark).__name__}; valid: {BENCHMARKS}")
    values = {key: arguments.get(key, default) for key, default in asdict(RecordSettings()).items()}
    records = read_section(RecordSettings, "benchmark", values)
    folder = save_records(benchmark, Path.cwd(), cache_folder() / "espalier" / "own", records)
    return {"benchmark": "data", "benchmark.path": folder}


def _key(name: str, value: Any, method: str | Method) -> str:
    """Return the config key of an argument; what no other part of the config has is a hyper-parameter.

    Raises:
        UserError: it is neither.
    """
    if name in OF_COMMANDS:
        raise UserError(f"{name} is for commands of several runs; valid: without {name}")
    if "." in name or name in RUN_KEYS:
        return name
    if name in PLACES:
        return PLACES[name]
    dotted = [f"**{{'{part}.{name}': {value!r}}}" for part, names in PARTS.items() if name in names]
    if dotted and isinstance(method, str) and name not in parameters(method):
        raise UserError(f"{name}={value!r} is a key of a section; valid: {' or '.join(dotted)}")
    return parameter_key(name, value, method, ARGUMENTS)


def _in_memory(spec: RunSpec, model: Model, method: Method) -> RunSpec:
    """Return the run with the digest of the caller's weights in the place of a checkpoint's."""
    refuse_calibrated(model.spec, method, spec.method.name)
    with model.open_adapter() as adapter:
        digest = weights_digest(adapter.model, adapter.processor)
    return replace(spec, model=replace(spec.model, in_memory=digest))


@dataclass(frozen=True, eq=False)
class EvaluatedRun:
    """A finished run.

    Attributes:
        row: the stored row (docs/rows.md); `status` is `done`, `resumed` or `cached`.
        path: folder of the run in its store.
        ids: name of each document, for samples with names.
    """

    row: Mapping[str, Any]
    path: Path
    ids: Sequence[Any] = field(default=(), repr=False)

    @property
    def key(self) -> str:
        """The run key."""
        return str(self.row["run_key"])

    @property
    def status(self) -> str:
        """`done`, `resumed` after an interruption, or `cached` if the store had the row."""
        return str(self.row["status"])

    @property
    def headline(self) -> str:
        """Name of the benchmark's headline metric."""
        return str(self.row["extra"]["headline"])

    @property
    def value(self) -> float | None:
        """The headline metric; None where it is undefined."""
        return cast("float | None", self.row["metrics"][self.headline]["value"])

    @cached_property
    def metrics(self) -> dict[str, dict[str, float | None]]:
        """`value`, `stderr`, and the 95 % interval `low` and `high` of each metric; None where one is not known."""
        return {
            name: {**values, **self._interval(name, values["value"])}
            for name, values in self.row["metrics"].items()
        }

    @cached_property
    def samples(self) -> pd.DataFrame:
        """A line for each sample, in the order of the benchmark.

        Columns: `id`, `question`, `answer`, `target`, `score` of the headline metric, `visual` and `kept` visual tokens
        (`kept`: those that enter the last decoder layer), `tokens` of the answer, and the contribution to each metric.
        """
        answered, scorings = self._answers(), read_scorings(self._entries)
        lines = []
        for key, sample in sorted(finished_samples(self._entries).items()):
            context = sample.context or {}
            scored = answered.answers.get(key)
            entering = sample.record.entering
            lines.append(
                {
                    "id": self.ids[key[1]] if self.ids else f"{key[0]}/{key[1]}",
                    "question": context.get("question"),
                    "answer": sample.answer,
                    "target": context.get("target"),
                    "score": None if scored is None else scored.score,
                    "visual": sample.record.visual,
                    "kept": entering[-1] if entering else sample.record.visual,
                    "tokens": sample.output_tokens,
                    **(scorings[key].scores if key in scorings else {}),
                }
            )
        return pd.DataFrame(lines).astype({"score": "float64"})

    def against(self, baseline: EvaluatedRun, metric: str | None = None) -> RunComparison:
        """Compare with another run on the samples that both have; `metric` defaults to the headline.

        Raises:
            UserError: the runs are of different benchmarks, or share no sample.
        """
        if not isinstance(baseline, EvaluatedRun):
            raise UserError(
                f"against({type(baseline).__name__}); valid: the result of another espalier.evaluate"
            )
        try:
            ours, theirs = self._answers(metric), baseline._answers(metric or self.headline)
            return RunComparison(ours, theirs, compare(ours, theirs))
        except UserError as error:
            # Arguments are options of the command `store show`.
            raise UserError(str(error).replace("--", "")) from None

    def __repr__(self) -> str:
        """Return method, model, benchmark, headline metric and cost in one line."""
        row, metric = self.row, self.metrics[self.headline]
        tokens, share = row["tokens"], row["flops"]["share_of_full"]
        name = " ".join(filter(None, (row["method"], row["extra"].get("label"), amount(row))))
        value, low, high = metric["value"], metric["low"], metric["high"]
        score = "undefined" if value is None else f"{value:.3f}"
        if low is not None and high is not None:
            score = f"{score} [{low:.3f}, {high:.3f}]"
        return (
            f"{name} on {row['benchmark']} ({row['model']}): {self.headline} {score}, {row['n_samples']} samples, "
            f"{tokens['kept_final']:.4g} of {tokens['visual']:.4g} visual tokens kept, "
            f"{share:.0%} of the prefill FLOPs, {self.status} {self.key[:8]}"
        )

    def _repr_html_(self) -> str:
        frame = pd.DataFrame.from_dict(self.metrics, orient="index")
        return (
            f"<p>{escape(repr(self))}</p>{frame.to_html(float_format='{:.4g}'.format, na_rep='')}"
        )

    @cached_property
    def _entries(self) -> Sequence[Mapping[str, Any]]:
        return RunDir(self.path).journal.entries()

    def _answers(self, metric: str | None = None) -> AnsweredRun:
        return read_answers(RunDir(self.path), metric)

    def _interval(self, metric: str, value: float | None) -> dict[str, float | None]:
        """Return the ends of the interval of a metric that is the mean of its contributions; None for others."""
        scorings = {
            key: scoring
            for key, scoring in read_scorings(self._entries).items()
            if metric in scoring.scores
        }
        if value is None or "latency" in self.row["extra"] or len(scorings) < 2:
            return dict.fromkeys(("low", "high"))
        scores = np.array([scoring.scores[metric] for scoring in scorings.values()], dtype=float)
        units = [(key[0], scoring.units.get(metric, key[1])) for key, scoring in scorings.items()]
        if not np.isfinite(scores).all() or abs(scores.mean() - value) > ROUNDING:
            return dict.fromkeys(("low", "high"))
        interval = mean_interval(by_unit(scores, units))
        return {"low": interval.low, "high": interval.high}


@dataclass(frozen=True, eq=False)
class RunComparison:
    """Two runs on the same samples.

    Attributes:
        ours: the run that `against` was called on.
        theirs: the run that it is compared with.
        comparison: all pairs of answers.
    """

    ours: AnsweredRun = field(repr=False)
    theirs: AnsweredRun = field(repr=False)
    comparison: Comparison = field(repr=False)

    @property
    def difference(self) -> float | None:
        """The metric of ours minus theirs; None if contributions of samples are not known."""
        return None if self.comparison.gain is None else self.comparison.gain.value

    @property
    def interval(self) -> tuple[float, float] | None:
        """The paired 95 % interval of the difference."""
        gain = self.comparison.gain
        return None if gain is None else (gain.low, gain.high)

    @property
    def p(self) -> float | None:
        """McNemar's exact p for right/wrong scores, else that of the paired permutation test of the means."""
        return self.comparison.pvalue

    @property
    def mid_p(self) -> float | None:
        """McNemar's mid-p for right/wrong scores, which is nearer to its level; None for others."""
        return mcnemar_midp(self.broke, self.mended) if self.comparison.binary else None

    @property
    def broke(self) -> int:
        """Number of samples that ours scores lower."""
        return self.comparison.count(BROKE)

    @property
    def mended(self) -> int:
        """Number of samples that ours scores higher."""
        return self.comparison.count(MENDED)

    @cached_property
    def samples(self) -> pd.DataFrame:
        """A line for each sample with another score: `id`, `change`, question, target, answers and scores."""
        columns = ["id", "change", "question", "target", "answer", "other", "score", "other_score"]
        lines = [
            (
                *(pair.ours.name, pair.change),
                *(pair.ours.prompt.get("question"), pair.ours.prompt.get("target")),
                *(pair.ours.answer, pair.theirs.answer),
                *(pair.ours.score, pair.theirs.score),
            )
            for pair in self.comparison.pairs
            if pair.change != SAME
        ]
        return pd.DataFrame(lines, columns=columns)

    def __repr__(self) -> str:
        """Return the counts, the test and the paired difference in two lines."""
        return "\n".join(comparison_lines(self.ours, self.theirs, self.comparison))

    def _repr_html_(self) -> str:
        lines = comparison_lines(self.ours, self.theirs, self.comparison)
        return "".join(f"<p>{escape(line)}</p>" for line in lines)
