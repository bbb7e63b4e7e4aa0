"""Page about the tokens that a video draft needs: a table per ratio, words by kind, and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from espalier.harness.reports.curves.plot_style import STYLE
from lab.bench.bench_page import leave
from lab.bench.guided_words import KINDS, Guided, Setting, Told, summarised
from lab.bench.speed_bench import conditions

#: Plotted subsets: colour (safe for colour blindness), line and marker.
DRAWN: Mapping[str, tuple[str, str, str]] = {
    "objects, then random": ("#000000", "-", "*"),
    "UV-Prune": ("#0072B2", "-", "o"),
    "UV-Prune, sign turned": ("#56B4E9", "--", "o"),
    "attention": ("#D55E00", "-", "s"),
    "what changed since the frame before": ("#009E73", "-", "^"),
    "random": ("#7F7F7F", "--", "v"),
    "even in time and space": ("#7F7F7F", "-", "D"),
    "whole frames, even in time": ("#B0B0B0", ":", "P"),
}


def page(told: Sequence[Told], frames: int) -> str:
    """Return the page in Markdown."""
    summaries = summarised(told)
    words = sum(len(summary.caption) for summary in told)
    reference = summaries["everything", 0.0, "original"]
    lines = [
        "# What the guidance has to keep",
        "",
        "Written by `make bench-guided`. The embedded video model tells "
        f"{len(told)} held-out clips of {frames} frames ({36 * frames:,} visual tokens, {words:,} words in all). Its "
        "draft sees a part of the tokens and predicts each word behind the words before it. *Accepted* is the share "
        "of words that it predicts as the target said them (95 % interval over clips), *closed* the same where the "
        "gaps between its tokens are closed, *run* the words before the first wrong one; "
        "*objects* and *events* are the shares of the tokens that show an object, and of those in which something "
        "begins, that the draft sees. No clock and no window is in these figures.",
        "",
        f"With all tokens the draft predicts {reference.accepted.percent}, in runs of {reference.run:.0f} words "
        "from the "
        "start.",
        "",
        "![What a draft has to see of a video](speculative/guided.png)",
    ]
    for ratio in sorted({ratio for _, ratio, _ in summaries if ratio}):
        lines += ["", f"## {1 - ratio:.4g} of the tokens kept", ""]
        lines += [
            "| kept | accepted | closed | run | objects | events | " + " | ".join(KINDS) + " |"
        ]
        lines += ["| --- |" + " ---: |" * (5 + len(KINDS))]
        names = [name for name, at, places in summaries if at == ratio and places == "original"]
        ordered = sorted(names, key=lambda name: -summaries[name, ratio, "original"].accepted.value)
        lines += [_line(summaries, name, ratio) for name in ordered]
    lines += [
        "",
        "## The first wrong word",
        "",
        "Share of captions whose first wrong word is of a kind, a tenth of the tokens kept.",
        "",
    ]
    lines += [
        "| kept | " + " | ".join(KINDS) + " | none |",
        "| --- |" + " ---: |" * (len(KINDS) + 1),
    ]
    for (name, ratio, places), summary in summaries.items():
        if places == "original" and ratio in (0.0, 0.9):
            shares = [*summary.first.values(), 1 - sum(summary.first.values())]
            lines.append(
                f"| {name} | " + " | ".join(f"{100 * share:.0f}" for share in shares) + " |"
            )
    return "\n".join(lines) + "\n"


def _line(summaries: Mapping[Setting, Guided], name: str, ratio: float) -> str:
    here, closed = (summaries[name, ratio, places] for places in ("original", "renumbered"))
    kinds = [f"{100 * here.by_kind[kind]:.0f}" if kind in here.by_kind else "-" for kind in KINDS]
    cells = [
        here.accepted.percent,
        f"{100 * closed.accepted.value:.1f}",
        f"{here.run:.1f}",
        f"{100 * here.objects:.0f} %",
        f"{100 * here.events:.0f} %",
        *kinds,
    ]
    return f"| {name} | " + " | ".join(cells) + " |"


def write_page(told: Sequence[Told], frames: int, folder: Path) -> None:
    """Write `guided.md`, `guided.json` and `speculative/guided.png` into a folder."""
    summaries = summarised(told)
    settings = [
        {"kept": name, "ratio": ratio, "positions": places, **asdict(summary)}
        for (name, ratio, places), summary in summaries.items()
    ]
    result = {
        "conditions": conditions("cpu"),
        "clips": len(told),
        "frames": frames,
        "settings": settings,
    }
    leave(folder, "guided", page(told, frames), result)
    (folder / "speculative").mkdir(exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure = draw(summaries)
        figure.savefig(folder / "speculative" / "guided.png", dpi=160)


def draw(summaries: Mapping[Setting, Guided]) -> Figure:
    """Return the figure: accepted words by share of tokens kept, and by kind of word at a tenth."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    ratios = sorted({ratio for _, ratio, _ in summaries if ratio})
    _draw_curves(left, summaries, ratios)
    _draw_kinds(right, summaries, 0.9 if 0.9 in ratios else ratios[-1])
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False
    )
    return figure


def _draw_curves(axes: Axes, summaries: Mapping[Setting, Guided], ratios: Sequence[float]) -> None:
    places = range(len(ratios))
    for name, (colour, line, marker) in DRAWN.items():
        shares = [summaries[name, ratio, "original"].accepted for ratio in ratios]
        values = [100 * share.value for share in shares]
        axes.plot(places, values, color=colour, linestyle=line, marker=marker, label=name)
        axes.fill_between(
            places,
            [100 * share.low for share in shares],
            [100 * share.high for share in shares],
            color=colour,
            alpha=0.12,
            linewidth=0,
        )
    reference = 100 * summaries["everything", 0.0, "original"].accepted.value
    axes.axhline(reference, color="#000000", linewidth=0.9, linestyle=(0, (4, 3)))
    axes.annotate(
        "all tokens",
        (places[-1], reference),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        fontsize=8.5,
    )
    axes.set_xticks(places, [f"{100 * (1 - ratio):.4g} %" for ratio in ratios])
    axes.set_xlabel("share of the visual tokens that the draft sees")
    axes.set_ylabel("words accepted (%)")
    axes.set_title("By what is kept")


def _draw_kinds(axes: Axes, summaries: Mapping[Setting, Guided], ratio: float) -> None:
    kinds = [kind for kind in KINDS if kind in summaries["random", ratio, "original"].by_kind]
    for number, (name, (colour, _, marker)) in enumerate(DRAWN.items()):
        by_kind = summaries[name, ratio, "original"].by_kind
        shift = (number - (len(DRAWN) - 1) / 2) * 0.09
        places = [place + shift for place in range(len(kinds))]
        shares = [100 * by_kind[kind] for kind in kinds]
        axes.plot(places, shares, color=colour, marker=marker, linestyle="none")
    axes.set_xticks(range(len(kinds)), [f"{kind} words" for kind in kinds], rotation=20)
    axes.set_ylabel("words accepted (%)")
    axes.set_title(f"By kind of word, {100 * (1 - ratio):.4g} % of the tokens kept")
