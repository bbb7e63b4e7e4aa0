"""The figures of speculative decoders: speed-ups of all, and one by ratio and by guidance of its draft."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from espalier.harness.reports.curves.decoder_results import accepted_share
from espalier.harness.reports.curves.figures import Plot, Series, Spot, draw, marker, percent_spot
from espalier.harness.reports.curves.plot_style import COLOURS, GREYS, MARKERS
from espalier.harness.stats import Interval

#: Lines of speed-ups: name, column, colour and mark.
SPEEDS = (
    ("decoding alone", "speedup_decode", COLOURS[1], "o"),
    ("end to end", "speedup_end_to_end", COLOURS[2], "s"),
    ("promised", "speedup_predicted", GREYS[1], "D"),
)

#: Legend and colour of bars by whether draft and target run at the same time; apart in greyscale as well.
SIDES = {False: ("draft and target take turns", COLOURS[5]), True: ("side by side", COLOURS[0])}

PROMISED = "promised by acceptance and single forwards"
WHOLE = "end to end, prefill included"
PLAIN = ("plain decoding", Interval(1.0, 1.0, 1.0))
ACCEPTED = "drafted tokens accepted (%)"
BARS = "bars: 95 % bootstrap intervals over answers"


def setting_line(cells: pd.DataFrame) -> str:
    """Return one line on how results were made: models, device, threads, type, answers."""
    row = cells.result.iloc[0].row
    drafts = dict.fromkeys(cells.draft.dropna())
    environment = row["extra"].get("environment", {})
    threads = environment.get("threads")
    parts = [
        row["model"] + (f" with {', '.join(drafts)} as draft" if drafts else ""),
        environment.get("device_name"),
        threads and f"{threads} thread{'s' if threads > 1 else ''}",
        environment.get("dtype"),
        f"{', '.join(map(str, sorted(set(cells.n_samples))))} answers a row",
    ]
    return "; ".join(part for part in parts if part)


def draw_decoders(by_benchmark: Mapping[str, pd.DataFrame]) -> Figure:
    """Return bars of the decode speed-up, one plot for each benchmark."""
    plots = []
    for name, cells in by_benchmark.items():
        rows = [*enumerate(cells.itertuples())]
        series = [
            Series(
                label,
                [
                    Spot(row, cell.speedup_decode, text=f"{cell.speedup_decode:.2f}")
                    for row, cell in rows
                    if bool(cell.overlap) is side
                ],
                {"color": colour},
                solid=True,
                key=any(bool(cell.overlap) is side for _, cell in rows),
            )
            for side, (label, colour) in SIDES.items()
        ]
        promised = [Spot(row, cell.speedup_predicted) for row, cell in rows]
        end_to_end = [Spot(row, cell.speedup_end_to_end) for row, cell in rows]
        thick = marker("|", markersize=10, markeredgewidth=2, zorder=4)
        series += [
            Series(PROMISED, promised, marker("D", markerfacecolor="white", zorder=4), key=True),
            Series(WHOLE, end_to_end, thick, key=True),
        ]
        ticks = {float(row): cell.curve for row, cell in rows}
        heading = f"{name}, {cells.n_samples.iloc[0]} answers"
        values = "times as fast as plain decoding"
        look: dict[str, Any] = {"values": values, "level": PLAIN, "from_zero": True}
        plots.append(Plot("bars", heading, series, ticks=ticks, **look))
    every = pd.concat([*by_benchmark.values()])
    pruned = sorted({ratio for ratio in every.ratio if 0 < ratio < 1})
    notes = [f"where a draft does without some visual tokens: {100 * r:.4g} %" for r in pruned]
    return draw(plots, "How much faster decoders generate", _foot(every, *notes))


def draw_ratio(cells: pd.DataFrame) -> Figure:
    """Return speed-ups, acceptance and mean run over the draft's ratios, evenly spaced."""
    rows = [*cells.itertuples()]
    blind = [bool(cell.text_only) for cell in rows]
    ticks = {
        float(at): "words\nonly" if cell.text_only else f"{100 * cell.ratio:.4g}"
        for at, cell in enumerate(rows)
    }
    shares = [accepted_share(cell.result) for cell in rows]
    accepted = [percent_spot(at, share) for at, share in enumerate(shares) if share is not None]
    speeds = [
        line
        for name, column, colour, shape in SPEEDS
        for line in _split(name, _spots(cells[column]), colour, shape, blind)
    ]
    shared: dict[str, Any] = {"shape": "curve", "ticks": ticks}
    title = "times as fast as plain decoding"
    accepted_lines = _split("", accepted, COLOURS[0], "o", blind)
    run_lines = _split("", _spots(cells.accepted_run), COLOURS[0], "o", blind)
    without = "visual tokens the draft does without (%)"
    in_a_row = "tokens accepted in a row, mean (log scale)"
    plots = [
        Plot(title=title, series=speeds, level=PLAIN, from_zero=True, **shared),
        Plot(title=ACCEPTED, series=accepted_lines, from_zero=True, **shared),
        # Log scale: a draft that sees everything is accepted for whole answers, others for a token or two.
        Plot(title=in_a_row, series=run_lines, log_values=True, places=without, **shared),
    ]
    first = cells.result.iloc[0].row
    windows = ", ".join(f"{cell.row['extra']['speculative']['gamma']:g}" for cell in cells.result)
    foot = _foot(cells, _bars(shares), f"tokens drafted in a round, from left to right: {windows}")
    return draw(plots, f"{first['method']} on {first['benchmark']}", foot, columns=1)


def draw_guidance(cells: pd.DataFrame) -> Figure:
    """Return acceptance by guidance of the draft's tokens, and by the layer of the guidance."""
    shares = {cell.path: accepted_share(cell) for cell in cells.result}
    depth = cells.L.notna()
    full = cells[~depth & ~cells.text_only.map(bool) & (cells.ratio == 0)]
    level = None if full.empty else shares[full.index[0]]
    guided = cells[~depth & ~cells.text_only.map(bool) & (cells.ratio > 0)]
    layered = cells[depth & (cells.ratio > 0)]
    looks = {
        ratio: {"color": colour, "marker": shape, "markersize": 5.5}
        for ratio, colour, shape in zip(
            sorted({*guided.ratio, *layered.ratio}), cycle(COLOURS), cycle(MARKERS), strict=False
        )
    }
    shared: dict[str, Any] = {"values": ACCEPTED, "level": _level(level)}
    plots = []
    if len(guided):
        largest = guided.sort_values(
            ["ratio", "acceptance", "guidance"], ascending=[False, False, True]
        )
        names = [*dict.fromkeys(largest.guidance)]
        series = []
        for number, (ratio, look) in enumerate(looks.items()):
            # Shift the ratios of one guidance, so that their intervals do not overlap.
            gap = 0.22 * (number - (len(looks) - 1) / 2)
            spots = [
                percent_spot(names.index(cell.guidance) + gap, share)
                for cell in guided[guided.ratio == ratio].itertuples()
                if (share := shares[cell.Index])
            ]
            series.append(Series(_left_out(ratio), spots, {**look, "linestyle": ""}, key=True))
        ticks = {float(row): name for row, name in enumerate(names)}
        title = "by what chooses its visual tokens"
        plots.append(Plot("dots", title, series, ticks=ticks, **shared))
    if len(layered):
        layers = sorted(set(layered.L))
        series = []
        for ratio, look in looks.items():
            group = layered[layered.ratio == ratio].sort_values("L")
            spots = [percent_spot(c.L, s) for c in group.itertuples() if (s := shares[c.Index])]
            series.append(Series(_left_out(ratio), spots, look, key=True))
        ticks = {float(layer): f"{layer}" for layer in layers}
        title, places = (
            f"{layered.guidance.iloc[0]}, by depth",
            "layer L of the target that is read",
        )
        plots.append(
            Plot("scatter", title, series, places=places, ticks=ticks, shift=0.08, **shared)
        )
    first = cells.result.iloc[0].row
    title = f"What {first['method']}'s draft should see, on {first['benchmark']}"
    return draw(plots, title, _foot(cells, _bars([*shares.values()])))


def _spots(values: Iterable[float | None]) -> list[Spot]:
    return [Spot(at, value) for at, value in enumerate(values)]


def _split(
    name: str, spots: Sequence[Spot], colour: str, shape: str, blind: Sequence[bool]
) -> list[Series]:
    """Return a line over the ratios; a text-only draft is a hollow mark apart from it at the end."""
    look = {"color": colour, "marker": shape, "markersize": 5, "clip_on": False, "zorder": 3}
    hollow = {**look, "linestyle": "", "markerfacecolor": "white"}
    seeing = [spot for spot in spots if not blind[int(spot.at)]]
    words = [spot for spot in spots if blind[int(spot.at)]]
    label = colour if name else None
    lines = [Series(name, seeing, look, None if words else label)]
    return [*lines, *([Series(name, words, hollow, label)] if words else [])]


def _left_out(ratio: float) -> str:
    return f"{100 * ratio:.4g} % of the tokens left out"


def _level(share: Interval | None) -> tuple[str, Interval] | None:
    if share is None:
        return None
    value = 100 * share.value
    return "draft sees everything", Interval(value, value, value)


def _bars(shares: Sequence[Interval | None]) -> str:
    return BARS if any(share is not None and share.low < share.high for share in shares) else ""


def _foot(cells: pd.DataFrame, *notes: str) -> str:
    return "\n".join([setting_line(cells), *filter(None, notes)])
