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

#: Requests of a load from which a 99th percentile is more than its slowest requests.
MANY = 100

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
    spread = "; gains with 95 % intervals over pairs of lives" if lives > 1 else ""
    lines = [
        f"{subject(rows)} in vLLM on {device}, {engine_lives(lives)} of each, medians of a "
        f"load, means over lives{spread}.",
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
            if figures.requests.min() < MANY:
                means["first_p99_ms"] = None
            values = {name: (means[name], form) for name, (_, form) in SHOWN.items()}
            cells = ["-" if pd.isna(v) else form.format(v) for v, form in values.values()]
            lines.append(f"| {load} | `{method}` | {' | '.join(cells)} |")
    return lines


def subject(rows: pd.DataFrame) -> str:
    """Return the model, and the frames of its videos if they are no pictures."""
    model, frames = rows.model.iloc[0], rows.frames.iloc[0] if "frames" in rows else None
    return str(model) if pd.isna(frames) else f"{model}, videos of {frames:.0f} frames,"


def sentence(rows: pd.DataFrame, method: str) -> str:
    """Return a method's gains at the smallest and largest closed load, what gets worse, its price, and goodputs."""
    closed = rows[rows.in_flight.notna()]
    ends = sorted({closed.in_flight.min(), closed.in_flight.max()})
    loads = [closed[closed.in_flight == number] for number in ends]
    gains = {
        title: [gain(part, method, column, rising) for part in loads]
        for column, title, rising in COMPARED
    }
    names = [load_name(part) for part in loads]
    tokens = " and ".join(
        f"{rows[rows.method == name].prompt_tokens.iloc[0]:,}" for name in (PLAIN, method)
    )
    parts = [
        f"`{method}` at {rows[rows.method == method].ratio.iloc[0]:g} (prompts of {tokens} tokens), "
        f"{' and '.join(names)}: "
        + ", ".join(f"{title} {' and '.join(map(factor, gains[title]))}" for title in gains)
    ]
    worse = [
        f"{title}, {name}"
        for title, intervals in gains.items()
        for name, interval in zip(names, intervals, strict=True)
        if upper_end(interval) < 1
    ]
    if worse:
        parts.append(f"slower than unpruned: {'; '.join(worse)}")
    shares = selection_shares(rows[rows.method == method])
    if len(shares):
        low, high = f"{100 * shares.min():.0f}", f"{100 * shares.max():.0f}"
        parts.append(
            f"choosing takes {low if low == high else f'{low} to {high}'} % of the encoder's time"
        )
    if rows.rate.notna().any():
        limit = rows.limit_ms.dropna().iloc[0]
        rates = " against ".join(goodput(rows, name) for name in (method, PLAIN))
        parts.append(f"goodput within {limit:.0f} ms: {rates} requests a second")
    return "; ".join(parts) + "."


def load_name(part: pd.DataFrame) -> str:
    """Return what a closed load is by its rows: no request of a burst takes the place of one that has ended."""
    number, requests = part.in_flight.iloc[0], part.requests.min()
    if is_burst(part):
        return f"a burst of {requests:.0f}"
    return f"{requests:.0f} requests with {number:.0f} in flight"


def is_burst(part: pd.DataFrame) -> bool:
    """Return whether all requests of a closed load start at once."""
    return bool(part.requests.min() <= part.in_flight.iloc[0])


def upper_end(interval: Interval) -> float:
    """Return the upper end of an interval, or the value of a single pair, which has no interval."""
    return interval.value if interval.high != interval.high else interval.high


def selection_shares(rows: pd.DataFrame) -> pd.Series:
    """Return the share of the encoder's time that choosing takes, load by load; vLLM does not time its own."""
    loads = rows.fillna({"in_flight": 0, "rate": 0}).groupby(["in_flight", "rate"])
    sums = loads[["selection_ms", "encoder_ms"]].sum(min_count=1).dropna()
    return sums.selection_ms / sums.encoder_ms


def engine_lives(number: int) -> str:
    """Return a number of engine lives in words."""
    return f"{number} engine {'life' if number == 1 else 'lives'}"


def gain(rows: pd.DataFrame, method: str, column: str, rising: bool) -> Interval:
    """Return how many times better a method is than the unpruned model at one load, over pairs of lives."""
    plain, reduced = (
        rows[rows.method == name].sort_values("life")[column].to_numpy() for name in (PLAIN, method)
    )
    return ratio_interval(reduced, plain) if rising else ratio_interval(plain, reduced)


def goodput(rows: pd.DataFrame, method: str) -> str:
    """Return the largest rate with enough requests in time, over lives.

    `below` where even the smallest tested rate is too much, `at least` where no tested rate is.
    """
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
    low, high = (
        f"{rate:.2f}" if rate else f"below {open_loop.rate.min():.2f}"
        for rate in (min(best), max(best))
    )
    spread = low if low == high else f"{low} to {high}"
    return f"at least {spread}" if passed == len(best) else spread


def factor(interval: Interval) -> str:
    """Return a factor with its interval; a single pair has none."""
    ends = f" [{interval.low:.2f}, {interval.high:.2f}]" if interval.low == interval.low else ""
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
    spread = ", 95 % intervals over pairs of lives" if lives > 1 else ""
    bursts = [part.in_flight.iloc[0] for _, part in closed.groupby("in_flight") if is_burst(part)]
    burst = (
        f" {', '.join(f'{number:.0f}' for number in bursts)} in flight: one burst."
        if bursts
        else ""
    )
    foot = f"{device}; {engine_lives(lives)} of each in turns{spread}.{burst}"
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
    for _, part in rows[rows.in_flight.notna()].groupby("in_flight"):
        yield load_name(part), part
    for rate, part in rows[rows.rate.notna()].groupby("rate"):
        yield f"{rate:.2f} a second", part
