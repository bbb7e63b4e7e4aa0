"""The columns of the result tables, with their types, units and sources in a row (docs/rows.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from espalier.harness.reports.curves.point_frame import COUNT, FLAG, NUMBER, TEXT
from espalier.harness.specs.comparable import name, policy
from espalier.harness.specs.run_spec import METERS
from espalier.harness.store.unparsed_mark import is_marked

Row = Mapping[str, Any]


class ResultColumn(NamedTuple):
    """A column: pandas dtype, unit and meaning, and how to read it from a row (None for a metric's columns)."""

    dtype: str
    meaning: str
    read: Callable[[Row], Any] | None


def _at(*keys: str) -> Callable[[Row], Any]:
    def read(row: Row) -> Any:
        value: Any = row
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    return read


#: Blocks of a row (harness/store/row_blocks.py) that the columns of `ROWS` need.
BLOCKS = (
    *("run_key", "model", "benchmark", "method", "variant", "ratio", "keep", "budget_rule"),
    *("seed", "n_samples", "metrics", "tokens", "flops", "time", "memory", "settings"),
    *(f"extra.{name}" for name in ("label", "headline", "higher_is_better", "aggregation")),
    *("extra.speculative", "extra.environment", "extra.unparsed", "extra.costs"),
)

#: One line for each cell and metric.
ROWS: Mapping[str, ResultColumn] = {
    "model": ResultColumn(TEXT, "name of the model's config file", _at("model")),
    "benchmark": ResultColumn(TEXT, "name of the benchmark", _at("benchmark")),
    "method": ResultColumn(TEXT, "name of the method", _at("method")),
    "curve": ResultColumn(
        TEXT, "name of its curve: method, what is off its defaults, the engine's policy", name
    ),
    "variant": ResultColumn(TEXT, "`paper`, or the released code's reading", _at("variant")),
    "label": ResultColumn(TEXT, "hyper-parameters off their default", _at("extra", "label")),
    "policy": ResultColumn(TEXT, "settings of the engine off their default", policy),
    "ratio": ResultColumn(NUMBER, "share of visual tokens removed, 0 to 1", _at("ratio")),
    "keep": ResultColumn(
        NUMBER, "visual tokens that stay of each sample, where that was set", _at("keep")
    ),
    "budget_rule": ResultColumn(
        TEXT, "how the ratio is counted: kept, average, flops", _at("budget_rule")
    ),
    "seed": ResultColumn(COUNT, "of random choices", _at("seed")),
    "n_samples": ResultColumn(COUNT, "samples asked", _at("n_samples")),
    "metric": ResultColumn(TEXT, "name of the metric", None),
    "headline": ResultColumn(FLAG, "whether it is the benchmark's headline", None),
    "value": ResultColumn(NUMBER, "the metric, in its own unit: accuracies from 0 to 1", None),
    "stderr": ResultColumn(NUMBER, "its standard error, same unit; NaN where unknown", None),
    "higher_is_better": ResultColumn(FLAG, "of the headline", _at("extra", "higher_is_better")),
    "unread": ResultColumn(
        FLAG, "whether more than 5 % of the run's answers could not be read", is_marked
    ),
    "aggregation": ResultColumn(TEXT, "mean, influence, combined or once", None),
    "visual_tokens": ResultColumn(
        NUMBER, "visual tokens of a prompt, mean", _at("tokens", "visual")
    ),
    "kept_tokens": ResultColumn(
        NUMBER, "of these after the last site, mean", _at("tokens", "kept_final")
    ),
    "layer_tokens": ResultColumn(
        NUMBER, "visual tokens entering a decoder layer, mean", _at("tokens", "layer_average")
    ),
    "flops_share": ResultColumn(
        NUMBER, "share of the unreduced prefill's FLOPs, 0 to 1", _at("flops", "share_of_full")
    ),
    "prefill_flops": ResultColumn(NUMBER, "FLOPs of a prefill", _at("flops", "prefill_exact")),
    "vision_ms": ResultColumn(NUMBER, "ms, median over samples", _at("time", "vision_ms")),
    "select_ms": ResultColumn(NUMBER, "ms, median: selection", _at("time", "select_ms")),
    "prefill_ms": ResultColumn(NUMBER, "ms, median: selection inside", _at("time", "prefill_ms")),
    "token_ms": ResultColumn(
        NUMBER, "ms a decoded token, median", _at("time", "decode_ms_per_token")
    ),
    "kv_bytes": ResultColumn(NUMBER, "bytes of the cache after prefill", _at("memory", "kv_bytes")),
    "peak_bytes": ResultColumn(NUMBER, "bytes at the peak", _at("memory", "peak_bytes")),
    **{
        name: ResultColumn(
            NUMBER,
            f"{meter.unit} an answer, mean: {meter.quantity}",
            _at("extra", "costs", name, "mean"),
        )
        for name, meter in METERS.items()
    },
    "accepted_run": ResultColumn(
        NUMBER, "drafted tokens accepted in a row, mean", _at("extra", "speculative", "mean_run")
    ),
    "tokens_per_forward": ResultColumn(
        NUMBER,
        "tokens of an answer for each forward of the target",
        _at("extra", "speculative", "tokens_per_target_forward"),
    ),
    "acceptance": ResultColumn(
        NUMBER,
        "share of drafted tokens accepted, 0 to 1",
        _at("extra", "speculative", "acceptance"),
    ),
    "target_ms": ResultColumn(
        NUMBER, "ms of the target's forward, median", _at("extra", "speculative", "target_ms")
    ),
    "draft_ms": ResultColumn(
        NUMBER, "ms of the draft's forward, mean", _at("extra", "speculative", "draft_ms")
    ),
    "speedup": ResultColumn(
        NUMBER,
        "decoding over plain decoding of the same answers",
        _at("extra", "speculative", "speedup_decode"),
    ),
    "device": ResultColumn(TEXT, "name of the device", _at("extra", "environment", "device_name")),
    "precision": ResultColumn(TEXT, "numbers of the weights", _at("settings", "model", "dtype")),
    "commit": ResultColumn(TEXT, "of the harness", _at("extra", "environment", "commit")),
    "run_key": ResultColumn(TEXT, "of the run, which joins the tables", _at("run_key")),
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
