"""Stored results, the columns of all tables of them, and the frames that have these columns.

`make docs` writes the columns into docs/rows.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from espalier.harness.errors import tell_once
from espalier.harness.evaluation.journal_scores import SampleScores, read_scorings
from espalier.harness.specs.comparable import Row, name, policy
from espalier.harness.specs.run_spec import METERS
from espalier.harness.store import RunDir
from espalier.harness.store.answer_digest import Key
from espalier.harness.store.exports import JournalEntry, dated_rows, is_table, read_scores
from espalier.harness.store.index import ReadRun, Walk, walk
from espalier.harness.store.row_text import is_marked

#: Types of columns.
TEXT, NUMBER, COUNT, FLAG = "string", "float64", "int64", "boolean"


class ResultColumn(NamedTuple):
    """A column: pandas dtype, unit and meaning, and how to read it from a row (None for a metric's columns)."""

    dtype: str
    meaning: str
    read: Callable[[Row], Any] | None


def at(path: str) -> Callable[[Row], Any]:
    """Return a function that reads a dotted path of a row, None where the row does not have it."""
    keys = path.split(".")

    def read(row: Row) -> Any:
        value: Any = row
        for key in keys:
            # Not `Mapping`: ten times the time, and a row is plain JSON.
            value = value.get(key) if isinstance(value, dict) else None
        return value

    return read


def _precision(row: Row) -> str | None:
    """Return the precision of a run's numbers, after the quantisation of its weights."""
    dtype, packed = at("settings.model.dtype")(row), at("settings.model.quantisation")(row)
    return dtype if packed is None else f"{packed}, {dtype}"


#: Blocks of a row (harness/store/index.py) that the columns of `ROWS` need.
BLOCKS = (
    *("run_key", "model", "benchmark", "method", "variant", "ratio", "keep", "budget_rule"),
    *("seed", "n_samples", "metrics", "tokens", "flops", "time", "memory", "settings"),
    *(f"extra.{name}" for name in ("label", "headline", "higher_is_better", "aggregation")),
    *("extra.speculative", "extra.environment", "extra.unparsed", "extra.costs"),
    "extra.latency",
)

#: One line for each cell and metric.
ROWS: Mapping[str, ResultColumn] = {
    "model": ResultColumn(TEXT, "name of the model's config file", at("model")),
    "benchmark": ResultColumn(TEXT, "name of the benchmark", at("benchmark")),
    "method": ResultColumn(TEXT, "name of the method", at("method")),
    "curve": ResultColumn(
        TEXT, "name of its curve: method, what is off its defaults, the engine's policy", name
    ),
    "variant": ResultColumn(
        TEXT, "`paper` or `official` (released code): the reading that ran", at("variant")
    ),
    "label": ResultColumn(
        TEXT, "hyper-parameters off their default, and which of two variants", at("extra.label")
    ),
    "policy": ResultColumn(TEXT, "settings of the engine off their default", policy),
    "ratio": ResultColumn(NUMBER, "share of visual tokens removed, 0 to 1", at("ratio")),
    "keep": ResultColumn(
        NUMBER, "visual tokens that stay of each sample, where that was set", at("keep")
    ),
    "budget_rule": ResultColumn(
        TEXT, "how the ratio is counted: kept, average, flops, kv_bytes", at("budget_rule")
    ),
    "seed": ResultColumn(COUNT, "of random choices", at("seed")),
    "n_samples": ResultColumn(COUNT, "samples asked", at("n_samples")),
    "metric": ResultColumn(TEXT, "name of the metric", None),
    "headline": ResultColumn(FLAG, "whether it is the benchmark's headline", None),
    "value": ResultColumn(NUMBER, "the metric, in its own unit: accuracies from 0 to 1", None),
    "stderr": ResultColumn(NUMBER, "its standard error, same unit; NaN where unknown", None),
    "higher_is_better": ResultColumn(FLAG, "of the headline", at("extra.higher_is_better")),
    "unread": ResultColumn(
        FLAG, "whether more than 5 % of the run's answers could not be read", is_marked
    ),
    "aggregation": ResultColumn(TEXT, "mean, influence, combined or once", None),
    "visual_tokens": ResultColumn(NUMBER, "visual tokens of a prompt, mean", at("tokens.visual")),
    "kept_tokens": ResultColumn(
        NUMBER, "of these after the last site, mean", at("tokens.kept_final")
    ),
    "layer_tokens": ResultColumn(
        NUMBER, "visual tokens entering a decoder layer, mean", at("tokens.layer_average")
    ),
    "flops_share": ResultColumn(
        NUMBER, "share of the unreduced prefill's FLOPs, 0 to 1", at("flops.share_of_full")
    ),
    "prefill_flops": ResultColumn(NUMBER, "FLOPs of a prefill", at("flops.prefill_exact")),
    "vision_ms": ResultColumn(NUMBER, "ms, median over samples", at("time.vision_ms")),
    "select_ms": ResultColumn(NUMBER, "ms, median: selection", at("time.select_ms")),
    "prefill_ms": ResultColumn(NUMBER, "ms, median: selection inside", at("time.prefill_ms")),
    "token_ms": ResultColumn(NUMBER, "ms a decoded token, median", at("time.decode_ms_per_token")),
    "kv_bytes": ResultColumn(NUMBER, "bytes of the cache after prefill", at("memory.kv_bytes")),
    "peak_bytes": ResultColumn(NUMBER, "bytes at the peak", at("memory.peak_bytes")),
    **{
        name: ResultColumn(
            NUMBER,
            f"{meter.unit} an answer, mean: {meter.quantity}",
            at(f"extra.costs.{name}.mean"),
        )
        for name, meter in METERS.items()
    },
    "accepted_run": ResultColumn(
        NUMBER, "drafted tokens accepted in a row, mean", at("extra.speculative.mean_run")
    ),
    "tokens_per_forward": ResultColumn(
        NUMBER,
        "tokens of an answer for each forward of the target",
        at("extra.speculative.tokens_per_target_forward"),
    ),
    "acceptance": ResultColumn(
        NUMBER,
        "share of drafted tokens accepted, 0 to 1",
        at("extra.speculative.acceptance"),
    ),
    "target_ms": ResultColumn(
        NUMBER, "ms of the target's forward, median", at("extra.speculative.target_ms")
    ),
    "draft_ms": ResultColumn(
        NUMBER, "ms of the draft's forward, mean", at("extra.speculative.draft_ms")
    ),
    "speedup": ResultColumn(
        NUMBER,
        "decoding over plain decoding of the same answers",
        at("extra.speculative.speedup_decode"),
    ),
    **{
        f"{phase}_gain": ResultColumn(
            NUMBER,
            f"of benchmark=latency: times as fast as the unreduced model, {phase}",
            at(f"extra.latency.gain.{phase}.ratio"),
        )
        for phase in ("prefill", "step")
    },
    "device": ResultColumn(TEXT, "name of the device", at("extra.environment.device_name")),
    "precision": ResultColumn(TEXT, "numbers of the weights, and how they are packed", _precision),
    "commit": ResultColumn(TEXT, "of the harness", at("extra.environment.commit")),
    "run_key": ResultColumn(TEXT, "of the run, which joins the tables", at("run_key")),
}

#: One line for each run, sample and metric.
SAMPLES: Mapping[str, tuple[str, str]] = {
    "run_key": (TEXT, "of the run"),
    "task": (TEXT, "lmms-eval's name of the task"),
    "doc_id": (COUNT, "number of the document in its split"),
    "metric": (TEXT, "name of the metric"),
    "score": (NUMBER, "what the sample contributes: the mean over samples is the metric"),
    "unit": (COUNT, "first document of its unit of statistics: resample these, not samples"),
}

#: One line for each point of a curve, of the headline metric, with its statistics.
POINTS: Mapping[str, tuple[str, str]] = {
    "model": (TEXT, "name of the model's config file"),
    "benchmark": (TEXT, "name of the benchmark"),
    "metric": (TEXT, "its headline"),
    "n_samples": (COUNT, "samples asked"),
    "curve": (TEXT, "its name"),
    "control": (FLAG, "whether no paper proposes it"),
    "floor": (TEXT, "the random dropping that it is compared with"),
    "ratio": (NUMBER, "share of visual tokens removed, 0 to 1"),
    "keep": (NUMBER, "visual tokens that stay of each sample, where that was set"),
    "flops_share": (NUMBER, "share of the unreduced prefill's FLOPs, 0 to 1"),
    **{
        f"{quantity}{end}": (NUMBER, meaning + suffix)
        for quantity, meaning in (
            ("score", "mean over samples, seeds averaged"),
            ("retention", "score over the unpruned score, paired"),
            ("gain", "score less random dropping's, paired"),
        )
        for end, suffix in (
            ("", ""),
            ("_low", ": lower 95 % bound"),
            ("_high", ": upper 95 % bound"),
        )
    },
    "lost_p": (NUMBER, "p-value against the unpruned model, Holm over the benchmark"),
    "gain_p": (NUMBER, "p-value against random dropping, uncorrected"),
    "gain_p_holm": (NUMBER, "the same, Holm over the benchmark"),
    "best_p": (
        NUMBER,
        "p-value against the best method there, Holm over the benchmark; of the best 1, of controls NaN",
    ),
    "unread": (FLAG, "whether more than 5 % of a run's answers could not be read"),
}


@dataclass(frozen=True, slots=True)
class StoredResult:
    """A finished run: its folder, its row, when that was committed, and the entries of its journal from a table."""

    path: Path
    row: Row
    committed: float
    entries: Sequence[JournalEntry] | None = None

    def journal(self) -> Sequence[JournalEntry]:
        """Return the entries of its samples; those of a table hold scores alone, no answers."""
        return RunDir(self.path).journal.entries() if self.entries is None else self.entries

    def scorings(self) -> dict[Key, SampleScores]:
        """Return the scores of each sample."""
        return read_scorings(self.journal())


def stored_results(
    store: Path,
    blocks: Collection[str],
    skip: Callable[[ReadRun], None],
    read: Walk = walk,
    scored: bool = True,
) -> Iterator[StoredResult]:
    """Yield the results of a store, ordered by key, or of a folder of tables, oldest first.

    Args:
        store: the folder.
        blocks: the blocks of a row that the caller needs.
        skip: receives runs without a row: damaged ones, and those that are not finished.
        read: reads run stores.
        scored: whether the caller needs scores of samples.

    Raises:
        UserError: a table is damaged.
    """
    if is_table(store):
        rows = dated_rows(store)
        entries = read_scores(store, (row["run_key"] for _, row in rows)) if scored else {}
        for committed, row in rows:
            key = row["run_key"]
            yield StoredResult(store / key, row, committed, entries.get(key))
        return
    for run in read(store, blocks):
        if run.row is None:
            skip(run)
        else:
            yield StoredResult(run.path, run.row, run.committed)


def report_damaged(run: ReadRun) -> None:
    """Report a row that cannot be read on stderr; a run that is not finished has none."""
    if run.problem is not None:
        tell_once(f"passed over: {run.problem}")


def metric_lines(row: Row) -> Iterator[tuple[Any, ...]]:
    """Yield a line for each metric of a row, in the order of `ROWS`; equal texts are stored once."""
    shared = {name: column.read(row) for name, column in ROWS.items() if column.read is not None}
    aggregation = row["extra"].get("aggregation", {})
    for metric, values in row["metrics"].items():
        line = {
            **shared,
            "metric": metric,
            "headline": metric == row["extra"].get("headline"),
            "value": values.get("value"),
            "stderr": values.get("stderr"),
            "aggregation": aggregation.get(metric, {}).get("how"),
        }
        yield tuple(
            sys.intern(value) if isinstance(value, str) else value
            for value in (line[name] for name in ROWS)
        )


def typed(columns: Mapping[str, Iterable[Any]], types: Mapping[str, Sequence[Any]]) -> pd.DataFrame:
    """Return columns as a frame, each of its type, the first entry of its description."""
    return pd.DataFrame(
        {name: pd.array([*values], dtype=types[name][0]) for name, values in columns.items()}
    )
