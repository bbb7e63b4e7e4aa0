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

TIMES = "times as fast as plain decoding"
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
        sides = cells.overlap.map(bool).to_numpy()
        decode = [
            Spot(at, speed, text=f"{speed:.2f}") for at, speed in enumerate(cells.speedup_decode)
        ]
        bars = [
            Series(
                label,
                [spot for spot in decode if sides[int(spot.at)] == side],
                {"color": colour},
                solid=True,
                key=side in sides,
            )
            for side, (label, colour) in SIDES.items()
        ]
        diamond = marker("D", markerfacecolor="white", zorder=4)
        thick = marker("|", markersize=10, markeredgewidth=2, zorder=4)
        marks = [
            Series(PROMISED, _spots(cells.speedup_predicted), diamond, key=True),
            Series(WHOLE, _spots(cells.speedup_end_to_end), thick, key=True),
        ]
        plots.append(
            Plot(
                "bars",
                f"{name}, {cells.n_samples.iloc[0]} answers",
                [*bars, *marks],
                values=TIMES,
                ticks={float(row): curve for row, curve in enumerate(cells.curve)},
                level=PLAIN,
                from_zero=True,
            )
        )
    every = pd.concat([*by_benchmark.values()])
    pruned = sorted({ratio for ratio in every.ratio if 0 < ratio < 1})
    notes = [f"where a draft does without some visual tokens: {100 * r:.4g} %" for r in pruned]
    return draw(plots, "How much faster decoders generate", _foot(every, *notes))


def draw_ratio(cells: pd.DataFrame) -> Figure:
    """Return speed-ups, acceptance and mean run over the draft's ratios, evenly spaced."""
    blind = [*cells.text_only.map(bool)]
    ticks = {
        float(at): "words\nonly" if words else f"{100 * ratio:.4g}"
        for at, (words, ratio) in enumerate(zip(blind, cells.ratio, strict=True))
    }
    shares = [accepted_share(result) for result in cells.result]
    accepted = [percent_spot(at, share) for at, share in enumerate(shares) if share is not None]
    speeds = [
        line
        for name, column, colour, shape in SPEEDS
        for line in _split(name, _spots(cells[column]), colour, shape, blind)
    ]
    accepted_lines = _split("", accepted, COLOURS[0], "o", blind)
    run_lines = _split("", _spots(cells.accepted_run), COLOURS[0], "o", blind)
    without = "visual tokens the draft does without (%)"
    in_a_row = "tokens accepted in a row, mean (log scale)"
    plots = [
        Plot("curve", TIMES, speeds, ticks=ticks, level=PLAIN, from_zero=True),
        Plot("curve", ACCEPTED, accepted_lines, ticks=ticks, from_zero=True),
        # Log scale: a draft that sees everything is accepted for without_layer answers, others for a token or two.
        Plot("curve", in_a_row, run_lines, ticks=ticks, log_values=True, places=without),
    ]
    first = cells.result.iloc[0].row
    windows = ", ".join(f"{cell.row['extra']['speculative']['gamma']:g}" for cell in cells.result)
    foot = _foot(cells, _bars(shares), f"tokens drafted in a round, from left to right: {windows}")
    return draw(plots, f"{first['method']} on {first['benchmark']}", foot, columns=1)


def draw_guidance(cells: pd.DataFrame) -> Figure:
    """Return acceptance by guidance of the draft's tokens, and by the layer of the guidance."""
    shares = {result.path: accepted_share(result) for result in cells.result}
    layers, pruned = cells.L.notna(), cells.ratio > 0
    without_layer = ~layers & ~cells.text_only.map(bool)
    full, guided, layered = (
        cells[without_layer & ~pruned],
        cells[without_layer & pruned],
        cells[layers & pruned],
    )
    ratios = sorted({*guided.ratio, *layered.ratio})
    looks = [
        {"color": colour, "marker": shape, "markersize": 5.5}
        for _, colour, shape in zip(ratios, cycle(COLOURS), cycle(MARKERS), strict=False)
    ]
    level = shares[full.index[0]] if len(full) else None
    value = None if level is None else 100 * level.value
    shared: dict[str, Any] = {
        "values": ACCEPTED,
        "level": None
        if value is None
        else ("draft sees everything", Interval(value, value, value)),
    }

    def series(group: pd.DataFrame, column: str, places: Mapping[Any, float]) -> list[Series]:
        """Return the marks of each ratio at the places of a column's values, a line along layers."""
        line = {} if column == "L" else {"linestyle": ""}
        members = [group[group.ratio == ratio].sort_values(column) for ratio in ratios]
        return [
            Series(
                f"{100 * ratio:.4g} % of the tokens left out",
                [
                    percent_spot(places[at], share)
                    for at, path in zip(part[column], part.index, strict=True)
                    if (share := shares[path])
                ],
                {**look, **line},
                key=True,
            )
            for ratio, part, look in zip(ratios, members, looks, strict=True)
        ]

    plots = []
    if len(guided):
        ranked = guided.sort_values(
            ["ratio", "acceptance", "guidance"], ascending=[False, False, True]
        )
        names = {name: float(row) for row, name in enumerate(dict.fromkeys(ranked.guidance))}
        ticks = {row: name for name, row in names.items()}
        marks = series(guided, "guidance", names)
        title = "by what chooses its visual tokens"
        plots.append(Plot("dots", title, marks, ticks=ticks, shift=0.22, **shared))
    if len(layered):
        depths = {layer: float(layer) for layer in sorted(set(layered.L))}
        ticks = {depth: f"{layer}" for layer, depth in depths.items()}
        places, title = "layer L of the target that is read", layered.guidance.iloc[0]
        marks = series(layered, "L", depths)
        looks_at = {"places": places, "ticks": ticks, "shift": 0.08, **shared}
        plots.append(Plot("scatter", f"{title}, by depth", marks, **looks_at))
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
    line = Series(name, seeing, look, None if words else label)
    return [line, Series(name, words, hollow, label)] if words else [line]


def _bars(shares: Sequence[Interval | None]) -> str:
    return BARS if any(share is not None and share.low < share.high for share in shares) else ""


def _foot(cells: pd.DataFrame, *notes: str) -> str:
    return "\n".join([setting_line(cells), *filter(None, notes)])
