"""Content of the page as plain data: a line for each result, curves with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from espalier.harness.errors import UserError
from espalier.harness.reports.curves.comparison import averages, panel_of
from espalier.harness.reports.curves.curve_points import (
    CONTROLS,
    FULL,
    Curve,
    CurvePanel,
    CurvePoint,
)
from espalier.harness.reports.curves.metric_names import readable
from espalier.harness.reports.curves.plot_style import looks
from espalier.harness.reports.curves.stored_rows import StoredResult
from espalier.harness.reports.html.page_rows import PageResults, case_of
from espalier.harness.specs.comparable import Row, name
from espalier.harness.stats import Interval
from espalier.harness.store.row_text import is_marked

#: Columns of a line, in this order; those of `TEXTS` are indices of a list of texts.
TEXTS = ("model", "benchmark", "method", "curve", "kind", "metric", "rule", "device")
NUMBERS = (
    *("ratio", "keep", "seed", "samples", "value", "stderr"),
    *("flops", "ms", "kv", "higher", "unread"),
)

#: Kinds of methods by site, in the order of the filter.
KINDS = (
    "unpruned",
    "control",
    "before the LLM",
    "inside the LLM",
    "cache compressor",
    "denoising steps",
    "speculative decoder",
)


def kind_of(row: Row) -> str:
    """Return the kind of a row's method."""
    extra = row["extra"]
    sites = extra.get("sites") or []
    if row["method"] == FULL:
        return "unpruned"
    if extra.get("speculative"):
        return "speculative decoder"
    if row["method"] in CONTROLS:
        return "control"
    if extra.get("cache") and not sites:
        return "cache compressor"
    if extra.get("diffusion"):
        return "denoising steps"
    inside = bool(sites) and sites[0]["where"] == "layer" and sites[0]["layer"] > 0
    return KINDS[3] if inside else KINDS[2]


def lines(rows: Sequence[StoredResult]) -> dict[str, Any]:
    """Return columns with a value for each result: numbers, and texts as indices of the list of texts."""
    texts: dict[str, list[str]] = {key: [] for key in TEXTS}
    indices: dict[str, dict[str, int]] = {key: {} for key in TEXTS}
    columns: dict[str, list[Any]] = {key: [] for key in (*TEXTS, *NUMBERS)}
    for result in rows:
        line = _line(result.row)
        for key in TEXTS:
            index = indices[key].setdefault(line[key], len(texts[key]))
            if index == len(texts[key]):
                texts[key].append(line[key])
            columns[key].append(index)
        for key in NUMBERS:
            columns[key].append(_short(line[key]))
    return {"texts": texts, "columns": columns}


def _line(row: Row) -> dict[str, Any]:
    extra, time = row["extra"], row.get("time", {})
    headline = extra.get("headline")
    metric = row["metrics"].get(headline, {})
    times = [time.get("vision_ms"), time.get("prefill_ms")]
    return {
        **{key: row[key] for key in ("model", "benchmark", "method", "ratio")},
        "keep": row.get("keep"),
        "curve": name(row),
        "kind": kind_of(row),
        "metric": readable(str(headline)),
        "rule": row["budget_rule"],
        "device": str(extra.get("environment", {}).get("device_name")),
        "seed": row.get("seed", 0),
        "samples": row["n_samples"],
        "value": metric.get("value"),
        "stderr": metric.get("stderr"),
        "flops": row.get("flops", {}).get("share_of_full"),
        "ms": None if None in times else sum(times),
        "kv": row.get("memory", {}).get("kv_bytes"),
        "higher": int(extra.get("higher_is_better", True)),
        "unread": int(is_marked(row)),
    }


def panels(results: PageResults) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return curves with intervals for each model, benchmark and budget rule, and averages over benchmarks.

    Curves that cannot be paired are excluded. Drafts and denoised answers have their own figures, because their ratio
    has another meaning.
    """
    groups: dict[tuple[str, str, str], list[StoredResult]] = {}
    for result in results.rows:
        if not result.row["extra"].get("speculative") and not result.row["extra"].get("diffusion"):
            key = (result.row["model"], result.row["benchmark"], result.row["budget_rule"])
            groups.setdefault(key, []).append(result)
    page_panels = []
    measured: dict[tuple[str, str], list[CurvePanel]] = {}
    for (model, benchmark, rule), rows in sorted(groups.items()):
        try:
            panel = panel_of(benchmark, rows)
        except UserError as error:
            results.drop(f"no curves of {model} on {benchmark}", str(error))
            continue
        for note in panel.notes:
            results.notes.setdefault(f"{model} on {benchmark}", []).append(note)
        kinds = {name(result.row): kind_of(result.row) for result in rows}
        page_panels.append(_panel(panel, model, rule, kinds))
        measured.setdefault((model, rule), []).append(panel)
    means = [
        {**{"model": model, "rule": rule}, **mean}
        for (model, rule), group in measured.items()
        for mean in _means(group)
    ]
    return page_panels, means


def _means(group: Sequence[CurvePanel]) -> Iterator[dict[str, Any]]:
    """Yield the mean retention of each curve over benchmarks, at each ratio or number of tokens."""
    points = {point.amount: point for curve in group[0].curves for point in curve.points}
    for (curve, amount), interval in averages(group).items():
        yield {
            **{"curve": curve, "ratio": points[amount].ratio, "keep": points[amount].keep},
            **{"benchmarks": len(group), "retention": _ends(interval)},
        }


def _panel(panel: CurvePanel, model: str, rule: str, kinds: dict[str, str]) -> dict[str, Any]:
    return {
        "model": model,
        "benchmark": panel.benchmark,
        "rule": rule,
        "metric": readable(panel.metric),
        "samples": panel.n_samples,
        "full": _ends(panel.full),
        "curves": [_curve(curve, kinds[curve.name]) for curve in panel.curves],
    }


def _curve(curve: Curve, kind: str) -> dict[str, Any]:
    return {
        "name": curve.name,
        "kind": kind,
        "floor": curve.floor,
        "points": [_point(point) for point in curve.points],
    }


def _point(point: CurvePoint) -> dict[str, Any]:
    return {
        "ratio": point.ratio,
        "keep": point.keep,
        "flops": _short(point.flops),
        "score": _ends(point.score),
        "retention": _ends(point.retention),
        "gain": _ends(point.gain),
        "chance": _short(point.corrected_pvalue),
        "unread": int(point.unread),
    }


def styles(page_lines: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the look of each curve by name, from the columns that `lines` returned."""
    texts, columns = page_lines["texts"], page_lines["columns"]
    pairs = set(zip(columns["curve"], columns["kind"], strict=True))
    return looks(
        (texts["curve"][curve], texts["kind"][kind] in ("control", "unpruned"))
        for curve, kind in pairs
    )


def unscored(results: PageResults) -> None:
    """Exclude results without a value of their headline metric."""
    kept = []
    for result in results.rows:
        metric = result.row["metrics"].get(result.row["extra"].get("headline"), {})
        if metric.get("value") is None:
            results.drop("the headline has no number", case_of(result.row))
        else:
            kept.append(result)
    results.rows = kept


def _ends(interval: Interval | None) -> list[float | None] | None:
    if interval is None:
        return None
    return [_short(end) for end in (interval.value, interval.low, interval.high)]


def _short(number: float | None) -> float | None:
    """Return a number with five significant digits, as many as the page shows."""
    if number is None or not isfinite(number):
        return None
    return number if isinstance(number, int) else float(f"{number:.5g}")
