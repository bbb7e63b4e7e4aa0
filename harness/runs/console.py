"""The final output of a command: a sheet for one run, tables for many, omitted cells, figures, rows as JSON, advice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.table import Table

from espalier.harness.errors import plain, plain_values
from espalier.harness.paths import short_path
from espalier.harness.reports.curves.terminal_tables import (
    TerminalColumn,
    fits,
    latency_gains,
    latency_text,
    side_by_side,
    stacked_tables,
    summary_lines,
    tables_of,
)
from espalier.harness.runs import streams
from espalier.harness.runs.progress_bar import headline
from espalier.harness.runs.streams import StatusLine
from espalier.harness.specs.comparable import amount, brief, differences, grouped
from espalier.harness.specs.comparable import name as curve_name
from espalier.harness.specs.run_spec import METERS, RunOptions, RunSpec
from espalier.harness.store.row_text import FOOTNOTE, is_marked, mark

#: Note on rows of cache compressors with scores that do not depend on the eviction.
ONE_TOKEN_NOTE = "every answer is one token, chosen before the eviction, which only decided that the answer ends there"

#: Width of tables if the output is not a terminal.
WIDTH = 180


def print_rows(rows: Sequence[Mapping[str, Any]], stream: TextIO, full: bool) -> None:
    """Print each run as one line with its headline metric, or in full."""
    console = Console(file=stream)
    if not console.is_terminal:
        console = Console(file=stream, width=WIDTH)
    rows = [plain_values(dict(row)) for row in rows]
    # Cells of a sweep can be the same run (method=none at several ratios).
    by_key: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        by_key.setdefault(row["run_key"], row)
    unique = list(by_key.values())
    parts: list[RenderableType] = (
        [_sheet(row) for row in rows]
        if full
        else [*_tables(unique, console.width), *tables_of(unique, _method, console.width)]
    )
    affected = [row for row in unique if row["extra"].get("discriminates") is False]
    if affected and not full:
        names = dict.fromkeys(f"{_method(row)} on {row['benchmark']}" for row in affected)
        parts.append(f"{', '.join(names)}: {ONE_TOKEN_NOTE}")
    if any(map(is_marked, unique)):
        parts.append(FOOTNOTE)
    for part in parts:
        console.print(part)


def _tables(rows: Sequence[Mapping[str, Any]], width: int) -> list[RenderableType]:
    """Return one table; or, if it is too wide, for each benchmark the scores and below them the costs."""
    models = ", ".join(dict.fromkeys(row["model"] for row in rows))
    names, counts = _names(rows, rows), _counts(rows)
    metrics = TerminalColumn(
        "metric",
        tuple(f"{headline(row)} {_headline_score(row)}" for row in rows),
        "left",
    )
    benchmarks = TerminalColumn("benchmark", tuple(row["benchmark"] for row in rows), "left")
    status = TerminalColumn("", tuple(row["status"] for row in rows))
    columns = [benchmarks, *names, *_gains(rows), metrics, *counts, *_costs(rows), status]
    if fits(columns, width):
        title = f"{models}: headline metric ± standard error; median ms a sample (decode: a token)"
        return [side_by_side(columns, title)]
    groups = grouped(((row["benchmark"], headline(row)), row) for row in rows)
    parts: list[RenderableType] = []
    for (benchmark, metric), group in groups.items():
        scores = TerminalColumn(metric, tuple(map(_headline_score, group)), "left")
        states = TerminalColumn("status", tuple(row["status"] for row in group), "left")
        title = f"{models}, {benchmark}: ± standard error; median ms a sample (decode: a token)"
        values = [*_gains(group), scores, *_counts(group), states], _costs(group)
        parts += stacked_tables(_names(group, rows), values, width, title)
    return parts


def _names(
    group: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> list[TerminalColumn]:
    methods = tuple(" ".join([_method(row), *_distinguishing_settings(row, rows)]) for row in group)
    ratios = tuple(map(amount, group))
    return [TerminalColumn("method", methods, "left"), TerminalColumn("ratio", ratios)]


def _gains(rows: Sequence[Mapping[str, Any]]) -> list[TerminalColumn]:
    """Return a column for each clocked phase: times as fast as the unreduced model."""
    gains = [latency_gains(row) for row in rows]
    return [
        TerminalColumn(
            f"{phase} gain", tuple(f"{g[phase]:.2f}x" if phase in g else "-" for g in gains)
        )
        for phase in dict.fromkeys(phase for gain in gains for phase in gain)
    ]


def _counts(rows: Sequence[Mapping[str, Any]]) -> list[TerminalColumn]:
    caches = [row["extra"].get("cache") for row in rows]
    shares = tuple("-" if cache is None else f"{cache['share']:.1%}" for cache in caches)
    return [
        TerminalColumn("n", tuple(str(row["n_samples"]) for row in rows)),
        TerminalColumn("kept", tuple(f"{row['tokens']['kept_final']:.4g}" for row in rows)),
        *([TerminalColumn("cache", shares)] if any(caches) else []),
        TerminalColumn("FLOPs", tuple(f"{row['flops']['share_of_full']:.0%}" for row in rows)),
    ]


def _costs(rows: Sequence[Mapping[str, Any]]) -> list[TerminalColumn]:
    times = zip(*map(_times, rows), strict=True)
    headings = ("vision", "select", "prefill", "decode")
    return [
        *(TerminalColumn(heading, cells) for heading, cells in zip(headings, times, strict=True)),
        TerminalColumn("KV", tuple(_bytes(row["memory"]["kv_bytes"]) for row in rows)),
        *(
            TerminalColumn(name, tuple(map(_cost, costs)))
            for name in METERS
            if any(costs := [row["extra"].get("costs", {}).get(name) for row in rows])
        ),
    ]


def _sheet(row: Mapping[str, Any]) -> Table:
    tokens, flops, memory, extra = row["tokens"], row["flops"], row["memory"], row["extra"]
    vision, select, prefill, decode = _times(row)
    removed = f"ratio {amount(row)}" if row.get("keep") is None else amount(row)
    title = f"{row['model']}, {_method(row)}, {removed} ({row['budget_rule']})"
    table = Table(
        title=f"{title}, {row['benchmark']}",
        title_justify="left",
        box=None,
        pad_edge=False,
        show_header=False,
    )
    if gains := latency_text(row):
        table.add_row("gain", f"{gains} over the unreduced model")
    for name, values in sorted(row["metrics"].items(), key=lambda item: item[0] != headline(row)):
        marked = is_marked(row) and name == extra.get("headline")
        table.add_row("metric", f"{name} {_score(values)}{mark(marked)}")
    if any(values["stderr"] is not None for values in row["metrics"].values()):
        table.add_row("", "± standard error")
    table.add_row("samples", f"{row['n_samples']} ({row['status']}, key {row['run_key']})")
    if clipped := extra.get("clipped"):
        table.add_row(
            "clipped",
            f"{clipped} of the samples have fewer than {row['keep']} visual tokens, and keep all",
        )
    table.add_row(
        "visual tokens",
        f"{tokens['visual']:.4g}, asked to keep {tokens['requested_keep']:.4g}, kept {tokens['kept_final']:.4g}, "
        f"mean over layers {tokens['layer_average']:.4g}",
    )
    if cache := extra.get("cache"):
        table.add_row("visual entries", _cache_text(cache))
    if extra.get("discriminates") is False:
        table.add_row("", ONE_TOKEN_NOTE)
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
    for name, cost in extra.get("costs", {}).items():
        table.add_row(
            name, f"{_cost(cost)} an answer, {cost['per_token']:.3g} {cost['unit']} a token"
        )
    if speedup := extra.get("speedup"):
        table.add_row("speed-up", _speedup_text(speedup))
    for heading, text in summary_lines(row):
        table.add_row(heading, text)
    return table


def _cache_text(cache: Mapping[str, Any]) -> str:
    """Return what remains of a cache's visual entries, in total and by layer."""
    kept, entered = sum(cache["entries"]), sum(cache["entered"])
    low, high = min(cache["entries"]), max(cache["entries"])
    layers = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    # Includes newlines and separators, which stay unless they are candidates; missing in rows of older versions.
    all_positions, positions_text = cache.get("positions_share", cache["share"]), ""
    if all_positions != cache["share"]:
        positions_text = f", {all_positions:.1%} of all positions of images"
    return (
        f"{kept:.4g} of {entered:.4g} left in the KV cache ({cache['share']:.1%}, asked "
        f"{1 - cache['ratio']:.1%}{positions_text}), {layers} a layer"
    )


def _speedup_text(speedup: Mapping[str, Any]) -> str:
    prefill = speedup["prefill"]
    spread = "" if prefill["low"] is None else f" [{prefill['low']:.2f}, {prefill['high']:.2f}]"
    warning = "; above the bound: not believable" if speedup["above_bound"] else ""
    return (
        f"prefill {prefill['ratio']:.2f}x{spread} in {speedup['pairs']} pairs, "
        f"{prefill['bound']:.2f}x by FLOPs{warning}"
    )


def _method(row: Mapping[str, Any]) -> str:
    name = curve_name(row)
    return name if row["budget_rule"] == "kept" else f"{name} ({row['budget_rule']})"


def _distinguishing_settings(
    row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return the settings that distinguish a row from others with the same name in the table."""
    similar = [
        candidate
        for candidate in rows
        if all(candidate[key] == row[key] for key in ("model", "benchmark", "ratio"))
        and _method(candidate) == _method(row)
    ]
    if len(similar) == 1:
        return []
    index = similar.index(row)
    return [f"{key}={brief(values[index])}" for key, values in differences(similar).items()]


def _times(row: Mapping[str, Any]) -> tuple[str, ...]:
    names = ("vision_ms", "select_ms", "prefill_ms", "decode_ms_per_token")
    times = (row["time"][name] for name in names)
    return tuple("-" if value is None else f"{value:.2f}" for value in times)


def _headline_score(row: Mapping[str, Any]) -> str:
    return _score(row["metrics"][headline(row)]) + mark(is_marked(row))


def _score(values: Mapping[str, float | None]) -> str:
    value, stderr = values["value"], values["stderr"]
    number = "undefined" if value is None else f"{value:.3f}"
    return number + ("" if stderr is None else f" ± {stderr:.3f}")


def _cost(cost: Mapping[str, Any] | None) -> str:
    return "-" if cost is None else f"{cost['mean']:.3g} ± {cost['error']:.1g} {cost['unit']}"


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"


Rows = Sequence[Mapping[str, Any]]


def write_figures(
    spec: RunSpec,
    rows: Rows,
    left_out: Sequence[tuple[RunSpec, str]],
    complete: bool,
    waiting: StatusLine,
) -> Iterator[Path]:
    """Write the curves and the report of all rows and yield their paths; the report only of `complete` ones."""
    keys = {row["run_key"] for row in rows}
    if spec.curves is not None:
        waiting.say("drawing curves")
        # matplotlib and scipy take a second to import, and most runs draw nothing.
        from espalier.harness.reports.curves.curve_files import write_curves

        yield from write_curves(spec.store, spec.curves, run_keys=keys)
    # An interrupted sweep does not replace the report of a complete one.
    if spec.report is not None and complete:
        waiting.say("writing the report")
        from espalier.harness.reports.curves.method_report import (
            write_report,  # imports matplotlib and scipy
        )

        yield from write_report(spec, keys, left_out)


def print_left(word: str, cells: Sequence[tuple[RunSpec, str]], out: TextIO) -> None:
    """Print the cells that have no row, one line for each reason."""
    # Imports torch, which a stored row needs not.
    from espalier.harness.kinds.lookup import label_of

    for reason, specs in grouped((reason, spec) for spec, reason in cells).items():
        names = (
            f"{spec.method.title} {label_of(spec)}".strip()
            + f" {spec.budget.amount} {spec.benchmark.name}"
            for spec in specs
        )
        print(plain(f"{word}: {', '.join(names)}: {reason}"), file=out, flush=True)


def prints_json(spec: RunOptions, out: TextIO) -> bool:
    """Return whether rows are printed as JSON; with `auto`, if the output is not a terminal."""
    return not out.isatty() if spec.json == "auto" else spec.json


def print_json(row: Mapping[str, Any], out: TextIO) -> None:
    """Print a row as one line."""
    with streams.output():
        print(json.dumps(row, allow_nan=False), file=out, flush=True)


def print_end(spec: RunOptions, rows: Rows, advice: tuple[str, str] | None, out: TextIO) -> None:
    """Print the last row as JSON, or where the rows are and a next command."""
    if prints_json(spec, out):
        print_json(rows[-1], out)
        return
    keys = {row["run_key"] for row in rows}
    place = spec.store / "runs" / (keys.pop() if len(keys) == 1 else "*") / "row.json"
    with streams.output():
        print(f"\nrow: {plain(short_path(place))}", file=out)
        if advice is not None:
            line, purpose = advice
            print(f"next: {plain(line)}\n      {purpose}", file=out)
        out.flush()
