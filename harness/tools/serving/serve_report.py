"""Rows of serving benchmarks as a table, a sentence about each method, and a picture: speed-up against load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from espalier.harness.reports.curves.figures import Plot, Series, Spot, draw, save
from espalier.harness.reports.curves.plot_style import line_look, looks
from espalier.harness.stats import Interval, ratio_interval
from espalier.harness.store.files import durable

#: Name of the unpruned model in rows; share of requests in time that a rate needs.
PLAIN, IN_TIME = "none", 0.9

#: What is compared: column, title, and whether more is better.
COMPARED = (
    ("first_ms", "first token", False),
    ("end_ms", "whole answer", False),
    ("requests_per_second", "requests a second", True),
)

#: Columns of the table, and how they are printed.
SHOWN = {
    "first_ms": ("first token, ms", "{:.0f}"),
    "first_p99_ms": ("99 %", "{:.0f}"),
    "gap_ms": ("between tokens, ms", "{:.1f}"),
    "end_ms": ("answer, ms", "{:.0f}"),
    "requests_per_second": ("requests/s", "{:.2f}"),
    "blocks_peak": ("cache blocks", "{:.0f}"),
    "encoder_ms": ("encoder, ms", "{:.1f}"),
    "share": ("of it selection", "{:.0%}"),
}


def write(rows: pd.DataFrame, path: Path, device: str) -> list[str]:
    """Write `<path>.csv`, `.md`, `.png` and `.svg`; return the lines of the page.

    Args:
        rows: one for each life and load.
        path: of the files, without suffix.
        device: name of the machine's device.

    Raises:
        StoreLost: the disk is full or cannot be written.
    """
    lines = page(rows, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.replace(path.with_suffix(".csv"), rows.to_csv(index=False).encode())
    durable.replace(path.with_suffix(".md"), ("\n".join(lines) + "\n").encode())
    save(picture(rows, device), path)
    return lines


def page(rows: pd.DataFrame, device: str) -> list[str]:
    """Return the sentences and the table, in Markdown."""
    lives = rows.life.nunique()
    lines = [
        f"{subject(rows)} in vLLM on {device}, {lives} engine lives of each, medians of a load, means over lives; "
        "gains with 95 % intervals over pairs of lives.",
        "",
    ]
    lines += [f"- {sentence(rows, method)}" for method in methods(rows)]
    heads = ["load", "method", *(title for title, _ in SHOWN.values())]
    lines += ["", f"| {' | '.join(heads)} |", f"| --- | --- |{' ---: |' * len(SHOWN)}"]
    for load, part in _by_load(rows):
        for method in (PLAIN, *methods(rows)):
            figures = part[part.method == method]
            means = figures.mean(numeric_only=True)
            means["share"] = figures.selection_ms.sum() / max(figures.encoder_ms.sum(), 1e-9)
            if figures.selection_ms.isna().any():
                means["share"] = None  # vLLM does not time its own
            values = {name: (means[name], form) for name, (_, form) in SHOWN.items()}
            cells = ["-" if pd.isna(v) else form.format(v) for v, form in values.values()]
            lines.append(f"| {load} | `{method}` | {' | '.join(cells)} |")
    return lines


def subject(rows: pd.DataFrame) -> str:
    """Return the model, and the frames of its videos if they are no pictures."""
    model, frames = rows.model.iloc[0], rows.frames.iloc[0] if "frames" in rows else None
    return str(model) if pd.isna(frames) else f"{model}, videos of {frames:.0f} frames,"


def sentence(rows: pd.DataFrame, method: str) -> str:
    """Return what a method gains alone and under the largest closed load, and both goodputs."""
    closed = rows[rows.in_flight.notna()]
    single, largest = closed.in_flight.min(), closed.in_flight.max()
    ratio = rows[rows.method == method].ratio.iloc[0]
    sooner = [
        gain(closed[closed.in_flight == n], method, "first_ms", False) for n in (single, largest)
    ]
    ended, answered = (
        gain(closed[closed.in_flight == largest], method, column, rising)
        for column, _, rising in COMPARED[1:]
    )
    parts = [
        f"`{method}` at {ratio:g} is {factor(sooner[0])} sooner alone and {factor(sooner[1])} under load "
        f"({largest:.0f} in flight; whole answers {factor(ended)}, requests a second {factor(answered)})"
    ]
    if rows.rate.notna().any():
        limit = rows.limit_ms.dropna().iloc[0]
        rates = " against ".join(goodput(rows, name) for name in (method, PLAIN))
        parts.append(f"goodput within {limit:.0f} ms: {rates} requests a second")
    return "; ".join(parts) + "."


def gain(rows: pd.DataFrame, method: str, column: str, rising: bool) -> Interval:
    """Return how many times better a method is than the unpruned model at one load, over pairs of lives."""
    plain, reduced = (
        rows[rows.method == name].sort_values("life")[column].to_numpy() for name in (PLAIN, method)
    )
    return ratio_interval(reduced, plain) if rising else ratio_interval(plain, reduced)


def goodput(rows: pd.DataFrame, method: str) -> str:
    """Return the largest rate with enough requests in time, over lives; `at least` where no tested rate is too much."""
    open_loop = rows[rows.rate.notna() & (rows.method == method)]
    best, passed = [], 0
    for _, life in open_loop.groupby("life"):
        rate = 0.0
        for row in life.sort_values("rate").itertuples():
            if row.in_time < IN_TIME:
                break
            rate = float(row.rate)
        else:
            passed += 1
        best.append(rate)
    low, high = min(best), max(best)
    spread = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
    return f"at least {spread}" if passed == len(best) else spread


def factor(interval: Interval) -> str:
    """Return a factor with its interval; a single pair has none."""
    ends = f" [{interval.low:.2g}, {interval.high:.3g}]" if interval.low == interval.low else ""
    return f"{interval.value:.2f}x{ends}"


def methods(rows: pd.DataFrame) -> list[str]:
    """Return the names of the methods that remove tokens."""
    return [name for name in rows.method.unique() if name != PLAIN]


def picture(rows: pd.DataFrame, device: str) -> Figure:
    """Return the figure: gains over requests in flight, and the wait for the first token over arrivals."""
    closed, open_loop = rows[rows.in_flight.notna()], rows[rows.rate.notna()]
    names = methods(rows)
    styles = looks([(name, name == "random") for name in names] + [(PLAIN, True)])
    levels = {float(number): f"{number:.0f}" for number in sorted(closed.in_flight.unique())}
    plots = [
        Plot(
            "curve",
            title,
            [
                Series(
                    name, [*_gains(closed, name, column, rising)], line_look(styles[name]), key=True
                )
                for name in names
            ],
            places="requests in flight",
            values="times the unpruned model (log scale)",
            ticks=levels,
            log=True,
            log_values=True,
            shift=0.06,
            level=("equal", Interval(1.0, 1.0, 1.0)),
        )
        for column, title, rising in COMPARED
    ]
    if len(open_loop):
        waits = [
            Series(title, [*_waits(open_loop, name)], line_look(styles[name]), key=True)
            for name, title in ((PLAIN, "none (unpruned)"), *zip(names, names, strict=True))
        ]
        plots.append(
            Plot(
                "curve",
                "wait for the first token",
                waits,
                places="arrivals a second (Poisson)",
                values="ms, median (log scale)",
                log_values=True,
            )
        )
    title = f"{subject(rows)} in vLLM: gain against load"
    lives = rows.life.nunique()
    foot = f"{device}; {lives} engine lives of each in turns, 95 % intervals over pairs of lives."
    return draw(plots, title, foot)


def _gains(rows: pd.DataFrame, method: str, column: str, rising: bool) -> Iterator[Spot]:
    for number, part in rows.groupby("in_flight"):
        interval = gain(part, method, column, rising)
        ends = (interval.low, interval.high) if interval.low == interval.low else (None, None)
        yield Spot(float(number), interval.value, *ends)


def _waits(rows: pd.DataFrame, method: str) -> Iterator[Spot]:
    for rate, part in rows[rows.method == method].groupby("rate"):
        waits: Sequence[float] = part.first_ms.tolist()
        yield Spot(float(rate), sum(waits) / len(waits), min(waits), max(waits))


def _by_load(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    for number, part in rows[rows.in_flight.notna()].groupby("in_flight"):
        yield f"{number:.0f} in flight", part
    for rate, part in rows[rows.rate.notna()].groupby("rate"):
        yield f"{rate:.2f} a second", part
