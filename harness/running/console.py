"""What a person at the terminal sees: a progress bar while samples run, a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from harness.cells import brief, differences
from harness.cells import name as curve_name
from harness.report.speculative_table import lines, table_of

Hook = Callable[[int, int], None]

#: Width of tables where the output is not a terminal.
WIDTH = 180


@contextmanager
def progress_bar(title: str, stream: TextIO | None = None) -> Iterator[Hook]:
    """Yield a hook (finished, total) that draws a bar with samples per second; silent where there is no terminal."""
    console = Console(file=stream or sys.stderr)
    if not console.is_terminal:
        yield lambda finished, total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(title, total=None, rate="")

        def update(finished: int, total: int) -> None:
            speed = progress.tasks[0].speed
            rate = f"{speed:.1f} it/s" if speed else ""
            progress.update(bar, completed=finished, total=total, rate=rate)

        yield update


def print_rows(rows: Sequence[Mapping[str, Any]], stream: TextIO, full: bool) -> None:
    """Print runs as one line each with their headline metric, or each of them in full."""
    console = Console(file=stream)
    if not console.is_terminal:
        console = Console(file=stream, width=WIDTH)
    tables = [_table(rows), table_of(_once(rows), _method)]
    for part in [_sheet(row) for row in rows] if full else tables:
        if part is not None:
            console.print(part)


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    models = ", ".join(dict.fromkeys(row["model"] for row in rows))
    title = f"{models}: headline metric ± standard error; median ms a sample (decode: a token)"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("benchmark", "method"):
        table.add_column(heading, no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("metric", no_wrap=True)
    for heading in ("n", "kept", "FLOPs", "vision", "select", "prefill", "decode", "KV", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    shown = _once(rows)
    for row in shown:
        table.add_row(
            row["benchmark"],
            " ".join([_method(row), *_apart(row, shown)]),
            f"{row['ratio']:g}",
            _metric(*_headline_first(row)[0]),
            str(row["n_samples"]),
            f"{row['tokens']['kept_final']:.4g}",
            f"{row['flops']['share_of_full']:.0%}",
            *_times(row),
            _bytes(row["memory"]["kv_bytes"]),
            row["status"],
        )
    return table


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
        table.add_row("metric", _metric(name, values))
    table.add_row("samples", f"{row['n_samples']} ({row['status']}, key {row['run_key']})")
    table.add_row(
        "visual tokens",
        f"{tokens['visual']:.4g}, asked to keep {tokens['requested_keep']:.4g}, kept {tokens['kept_final']:.4g}, "
        f"mean over layers {tokens['layer_average']:.4g}",
    )
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
    value, stderr = values["value"], values["stderr"]
    number = "undefined" if value is None else f"{value:.3f}"
    return f"{name} {number}" + ("" if stderr is None else f" ± {stderr:.3f}")


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
