"""What a person at the terminal sees in the end: a sheet of one run, or tables of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.table import Table

from espalier.harness.errors import plain_values
from espalier.harness.reports.curves.speculative_table import lines, tables_of
from espalier.harness.reports.curves.terminal_columns import Column, below, beside, fits
from espalier.harness.specs.comparable import brief, differences
from espalier.harness.specs.comparable import name as curve_name
from espalier.harness.store.unparsed_mark import FOOTNOTE, is_marked, mark

#: Beside rows of cache compressors whose scores tell nothing of them.
SAME = "every answer is one token, chosen before entries go: eviction decided no more than that it ends there"

#: Width of tables where the output is not a terminal.
WIDTH = 180


def print_rows(rows: Sequence[Mapping[str, Any]], stream: TextIO, full: bool) -> None:
    """Print runs as one line each with their headline metric, or each of them in full."""
    console = Console(file=stream)
    if not console.is_terminal:
        console = Console(file=stream, width=WIDTH)
    rows = [plain_values(dict(row)) for row in rows]
    shown = _once(rows)
    parts: list[RenderableType]
    if full:
        parts = [_sheet(row) for row in rows]
    else:
        parts = [*_tables(shown, console.width), *tables_of(shown, _method, console.width)]
    if not full and any(row["extra"].get("discriminates") is False for row in shown):
        rows_so = [row for row in shown if row["extra"].get("discriminates") is False]
        names = ", ".join(dict.fromkeys(f"{_method(row)} on {row['benchmark']}" for row in rows_so))
        parts.append(f"{names}: {SAME}")
    if any(map(is_marked, shown)):
        parts.append(FOOTNOTE)
    for part in parts:
        console.print(part)


def _tables(rows: Sequence[Mapping[str, Any]], width: int) -> list[RenderableType]:
    """Return one table; or, where that is too wide, for each benchmark what was scored and below it what that cost."""
    models = ", ".join(dict.fromkeys(row["model"] for row in rows))
    names, counts = _names(rows, rows), _counts(rows)
    metrics = Column(
        "metric",
        tuple(_metric(*_headline_first(row)[0]) + mark(is_marked(row)) for row in rows),
        "left",
    )
    benchmarks = Column("benchmark", tuple(row["benchmark"] for row in rows), "left")
    status = Column("", tuple(row["status"] for row in rows))
    columns = [benchmarks, *names, metrics, *counts, *_costs(rows), status]
    if fits(columns, width):
        title = f"{models}: headline metric ± standard error; median ms a sample (decode: a token)"
        return [beside(columns, title)]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["benchmark"], _headline_first(row)[0][0]), []).append(row)
    parts: list[RenderableType] = []
    for (benchmark, headline), group in groups.items():
        scores = Column(
            headline,
            tuple(_score(_headline_first(row)[0][1]) + mark(is_marked(row)) for row in group),
            "left",
        )
        states = Column("status", tuple(row["status"] for row in group), "left")
        title = f"{models}, {benchmark}: median ms a sample (decode: a token)"
        values = [scores, *_counts(group), states], _costs(group)
        parts += below(_names(group, rows), values, width, title)
    return parts


def _names(group: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    methods = tuple(" ".join([_method(row), *_apart(row, rows)]) for row in group)
    ratios = tuple(f"{row['ratio']:g}" for row in group)
    return [Column("method", methods, "left"), Column("ratio", ratios)]


def _counts(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    caches = [row["extra"].get("cache") for row in rows]
    left = tuple("-" if cache is None else f"{cache['share']:.1%}" for cache in caches)
    return [
        Column("n", tuple(str(row["n_samples"]) for row in rows)),
        Column("kept", tuple(f"{row['tokens']['kept_final']:.4g}" for row in rows)),
        *([Column("cache", left)] if any(caches) else []),
        Column("FLOPs", tuple(f"{row['flops']['share_of_full']:.0%}" for row in rows)),
    ]


def _costs(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    times = zip(*map(_times, rows), strict=True)
    headings = ("vision", "select", "prefill", "decode")
    return [
        *(Column(heading, cells) for heading, cells in zip(headings, times, strict=True)),
        Column("KV", tuple(_bytes(row["memory"]["kv_bytes"]) for row in rows)),
    ]


def _once(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return each run once: cells of a sweep may be one and the same (method=none at several ratios)."""
    runs: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        runs.setdefault(row["run_key"], row)
    return list(runs.values())


def _sheet(row: Mapping[str, Any]) -> Table:
    tokens, flops, memory, extra = row["tokens"], row["flops"], row["memory"], row["extra"]
    vision, select, prefill, decode = _times(row)
    ran = f"{row['model']}, {_method(row)}, ratio {row['ratio']:g} ({row['budget_rule']})"
    table = Table(
        title=f"{ran}, {row['benchmark']}",
        title_justify="left",
        box=None,
        pad_edge=False,
        show_header=False,
    )
    for name, values in _headline_first(row):
        marked = is_marked(row) and name == row["extra"].get("headline")
        table.add_row("metric", _metric(name, values) + mark(marked))
    table.add_row("samples", f"{row['n_samples']} ({row['status']}, key {row['run_key']})")
    table.add_row(
        "visual tokens",
        f"{tokens['visual']:.4g}, asked to keep {tokens['requested_keep']:.4g}, kept {tokens['kept_final']:.4g}, "
        f"mean over layers {tokens['layer_average']:.4g}",
    )
    cache = extra.get("cache")
    if cache:
        table.add_row("visual entries", _held(cache))
    if extra.get("discriminates") is False:
        table.add_row("", SAME)
    table.add_row(
        "prefill",
        f"{flops['prefill_exact']:.4g} FLOPs, {flops['share_of_full']:.1%} of the unreduced model",
    )
    table.add_row(
        "time",
        f"vision {vision} ms, prefill {prefill} ms (selection {select} ms of it), decode {decode} ms a token; medians",
    )
    table.add_row(
        "memory",
        f"KV cache {_bytes(memory['kv_bytes'])} a sample, peak {_bytes(memory['peak_bytes'])}",
    )
    speedup = extra.get("speedup")
    if speedup:
        table.add_row("speed-up", _gain(speedup))
    for heading, text in lines(row):
        table.add_row(heading, text)
    return table


def _held(cache: Mapping[str, Any]) -> str:
    """Return what is left of a cache's visual entries, of all and layer by layer."""
    left, all_of_them = sum(cache["entries"]), sum(cache["entered"])
    low, high = min(cache["entries"]), max(cache["entries"])
    layers = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    # With newlines and separators, which stay unless they are candidates; rows of earlier versions do not say.
    every = cache.get("positions_share", cache["share"])
    beside = "" if every == cache["share"] else f", {every:.1%} of all positions of images"
    return (
        f"{left:.4g} of {all_of_them:.4g} left in the KV cache ({cache['share']:.1%}, asked "
        f"{1 - cache['ratio']:.1%}{beside}), {layers} a layer"
    )


def _gain(speedup: Mapping[str, Any]) -> str:
    prefill = speedup["prefill"]
    spread = "" if prefill["low"] is None else f" [{prefill['low']:.2f}, {prefill['high']:.2f}]"
    doubt = "; above the bound: not believable" if speedup["above_bound"] else ""
    return (
        f"prefill {prefill['ratio']:.2f}x{spread} in {speedup['pairs']} pairs, "
        f"{prefill['bound']:.2f}x by FLOPs{doubt}"
    )


def _method(row: Mapping[str, Any]) -> str:
    name = curve_name(row)
    return name if row["budget_rule"] == "kept" else f"{name} ({row['budget_rule']})"


def _apart(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings that tell a row from others that the table would call the same."""
    same = [
        one
        for one in rows
        if all(one[key] == row[key] for key in ("model", "benchmark", "ratio"))
        and _method(one) == _method(row)
    ]
    if len(same) == 1:
        return []
    place = same.index(row)
    return [f"{key}={brief(values[place])}" for key, values in differences(same).items()]


def _times(row: Mapping[str, Any]) -> tuple[str, ...]:
    names = ("vision_ms", "select_ms", "prefill_ms", "decode_ms_per_token")
    return tuple(_milliseconds(row["time"][name]) for name in names)


def _headline_first(row: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    headline = row["extra"].get("headline")
    return sorted(row["metrics"].items(), key=lambda item: item[0] != headline)


def _metric(name: str, values: Mapping[str, float | None]) -> str:
    return f"{name} {_score(values)}"


def _score(values: Mapping[str, float | None]) -> str:
    value, stderr = values["value"], values["stderr"]
    number = "undefined" if value is None else f"{value:.3f}"
    return number + ("" if stderr is None else f" ± {stderr:.3f}")


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
