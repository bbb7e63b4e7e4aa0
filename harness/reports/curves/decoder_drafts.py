"""Figures on the draft's input: how many visual tokens it does not see, and the guidance that chooses the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from espalier.harness.reports.curves.decoder_looks import (
    foot,
    head,
    mark,
    page,
    percent,
    tidy,
    title,
)
from espalier.harness.reports.curves.decoder_rows import DecoderResult, acceptance
from espalier.harness.reports.curves.plot_style import COLOURS, GREYS, INK
from espalier.harness.stats import Interval

BLUE, ORANGE, GREEN = COLOURS[:3]

#: Colour and marker of each ratio; acceptance by result folder.
Looks = Mapping[float, tuple[str, str]]
Acceptances = Mapping[Path, Interval | None]


def draw_ratio(cells: Sequence[DecoderResult]) -> Figure:
    """Return speed-ups, acceptance and mean run over the draft's ratios (evenly spaced), one above the other."""
    figure = page(6.2)
    panels = figure.subplots(3, 1, sharex=True, height_ratios=(1.7, 1, 1))
    speed_axes, accepted_axes, run_axes = panels
    ends = [acceptance(cell) for cell in cells]
    _whiskers(accepted_axes, ends, BLUE)
    _draw_line(
        accepted_axes, cells, [None if end is None else 100 * end.value for end in ends], BLUE, "o"
    )
    _draw_line(run_axes, cells, [cell.block.get("mean_run") for cell in cells], BLUE, "o")
    title(accepted_axes, "tokens of the draft accepted (%)")
    title(run_axes, "tokens accepted in a row, mean (log scale)")
    speeds = (
        ("speedup_decode", ORANGE, "o", "decoding alone"),
        ("speedup_end_to_end", GREEN, "s", "end to end, prefill included"),
        ("speedup_predicted", GREYS[1], "D", "promised by acceptance and single forwards"),
    )
    for key, colour, marker, _ in speeds:
        _draw_line(speed_axes, cells, [cell.block[key] for cell in cells], colour, marker)
    speed_axes.axhline(1, color=GREYS[1], linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    title(speed_axes, "times as fast as plain decoding")
    for axes in (speed_axes, accepted_axes):
        axes.set_ylim(bottom=0)
    # Log scale: a draft that sees everything is accepted for whole answers, others for a token or two.
    run_axes.set_yscale("log")
    run_axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    for axes in panels:
        axes.set_xlim(-0.4, len(cells) - 0.6)
        tidy(axes, "y")
    run_axes.set_xticks(range(len(cells)), [_tick(cell) for cell in cells])
    run_axes.set_xlabel("visual tokens the draft does without (%)")
    handles = [
        Line2D([], [], color=colour, marker=marker, label=text, markersize=5)
        for _, colour, marker, text in speeds
    ]
    head(figure, f"{cells[0].row['method']} on {cells[0].row['benchmark']}", handles)
    windows = ", ".join(f"{cell.block['gamma']:g}" for cell in cells)
    foot(
        figure,
        cells,
        _whiskers_note(ends),
        f"tokens drafted in a round, from left to right: {windows}",
    )
    return figure


def draw_guidance(cells: Sequence[DecoderResult]) -> Figure:
    """Return acceptance by guidance of the draft's tokens (left) and by the layer of the guidance (right)."""
    by_guidance = [
        cell for cell in cells if cell.params["L"] is None and not cell.params["text_only"]
    ]
    full = next((cell for cell in by_guidance if cell.ratio == 0), None)
    by_guidance = [cell for cell in by_guidance if cell.ratio > 0]
    by_layer = [cell for cell in cells if cell.params["L"] is not None and cell.ratio > 0]
    shares = sorted({cell.ratio for cell in (*by_guidance, *by_layer)})
    looks = {ratio: (COLOURS[i % len(COLOURS)], "os^Dv"[i % 5]) for i, ratio in enumerate(shares)}
    acceptances = {cell.path: acceptance(cell) for cell in cells}
    names = _ranked(by_guidance)
    figure = page(max(2.0, 0.32 * len(names)) + 1.5)
    parts = [name for name, group in (("guidance", by_guidance), ("layer", by_layer)) if group]
    widths = {"guidance": 1.25, "layer": 1.0}
    grid = figure.subplots(
        1, len(parts), squeeze=False, width_ratios=[widths[part] for part in parts]
    )[0]
    panels = dict(zip(parts, grid, strict=True))
    if "guidance" in panels:
        _by_guidance(panels["guidance"], by_guidance, names, looks, acceptances)
    if "layer" in panels:
        _by_layer(panels["layer"], by_layer, looks, acceptances)
    handles = [
        mark(marker, f"{percent(ratio)} of the tokens left out", color=colour)
        for ratio, (colour, marker) in looks.items()
    ]
    full_acceptance = None if full is None else acceptances[full.path]
    if full_acceptance is not None:
        for part, axes in panels.items():
            draw = axes.axvline if part == "guidance" else axes.axhline
            draw(
                100 * full_acceptance.value,
                color=INK,
                linewidth=1.0,
                linestyle=(0, (4, 3)),
                zorder=1,
            )
        label = "draft sees everything (none)"
        handles.append(Line2D([], [], color=INK, linewidth=1.0, linestyle="--", label=label))
    first = cells[0].row
    head(figure, f"What {first['method']}'s draft should see, on {first['benchmark']}", handles)
    foot(figure, cells, _whiskers_note(list(acceptances.values())))
    return figure


def _ranked(cells: Sequence[DecoderResult]) -> list[str]:
    """Return the guidances, best first at the largest ratio."""
    best: dict[str, tuple[float, float]] = {}
    for cell in cells:
        name, score = cell.params["guidance"], (cell.ratio, cell.block.get("acceptance") or 0.0)
        best[name] = max(best.get(name, score), score)
    return sorted(best, key=lambda name: (-best[name][0], -best[name][1], name))


def _by_guidance(
    axes: Axes,
    cells: Sequence[DecoderResult],
    names: Sequence[str],
    looks: Looks,
    acceptances: Acceptances,
) -> None:
    for index, (ratio, (colour, marker)) in enumerate(looks.items()):
        # Shift the ratios of one guidance, so that their whiskers do not overlap.
        shift = 0.22 * (index - (len(looks) - 1) / 2)
        for cell in cells:
            end = acceptances[cell.path]
            if cell.ratio == ratio and end is not None:
                y = names.index(cell.params["guidance"]) + shift
                axes.plot([100 * end.low, 100 * end.high], [y, y], color=colour, linewidth=1.1)
                axes.plot(100 * end.value, y, marker, color=colour, markersize=5.5, zorder=3)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("tokens of the draft accepted (%)")
    title(axes, "by what chooses its visual tokens")
    tidy(axes, "x")


def _by_layer(
    axes: Axes, cells: Sequence[DecoderResult], looks: Looks, acceptances: Acceptances
) -> None:
    layers = sorted({cell.params["L"] for cell in cells})
    for index, (ratio, (colour, marker)) in enumerate(looks.items()):
        group = [cell for cell in cells if cell.ratio == ratio]
        ends = {cell.params["L"]: acceptances[cell.path] for cell in group}
        points = [(layer, end) for layer, end in sorted(ends.items()) if end is not None]
        shift = 0.08 * (index - (len(looks) - 1) / 2)
        x = [layer + shift for layer, _ in points]
        axes.plot(x, [100 * end.value for _, end in points], color=colour, marker=marker)
        for x_position, (_, end) in zip(x, points, strict=True):
            axes.plot(
                [x_position, x_position],
                [100 * end.low, 100 * end.high],
                color=colour,
                linewidth=1.1,
            )
    axes.set_xticks(layers)
    axes.set_xlabel("layer L of the target that is read")
    axes.set_ylabel("tokens of the draft accepted (%)")
    title(axes, f"{cells[0].params['guidance']}, by depth")
    tidy(axes, "y")


def _draw_line(
    axes: Axes,
    cells: Sequence[DecoderResult],
    values: Sequence[float | None],
    colour: str,
    marker: str,
) -> None:
    """Draw a line over the ratios; a text-only draft is a separate hollow marker at the end."""
    points = [(i, value) for i, value in enumerate(values) if value is not None]
    for blind in (False, True):
        segment = [(i, value) for i, value in points if bool(cells[i].params["text_only"]) is blind]
        axes.plot(
            [i for i, _ in segment],
            [value for _, value in segment],
            color=colour,
            marker=marker,
            markersize=5,
            linestyle="" if blind else "-",
            markerfacecolor="white" if blind else colour,
            zorder=3,
            clip_on=False,
        )


def _whiskers(axes: Axes, ends: Sequence[Interval | None], colour: str) -> None:
    for x, end in enumerate(ends):
        if end is not None:
            axes.plot([x, x], [100 * end.low, 100 * end.high], color=colour, linewidth=1.1)


def _whiskers_note(ends: Sequence[Interval | None]) -> str:
    any_interval = any(end is not None and end.low < end.high for end in ends)
    return "bars: 95 % bootstrap intervals over answers" if any_interval else ""


def _tick(cell: DecoderResult) -> str:
    return "words\nonly" if cell.params["text_only"] else f"{100 * cell.ratio:.4g}"
