"""Page about the tokens that a video draft needs: a table per ratio, words by kind, and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from espalier.harness.reports.curves.figures import STYLE
from lab.bench.bench_page import conditions, leave
from lab.bench.guided_words import KINDS, CaptionRecord, Guided, Setting, summarised
from lab.pages.picture_grid import Estimate, GridPanel, Mark, PictureGrid, draw_grid

#: Subsets in the picture, in its order, with those that no paper proposes, and the shares removed.
DRAWN = (
    "what changed since the frame before",
    "objects, then random",
    "attention",
    "UV-Prune, sign turned",
    "UV-Prune",
    "even in time and space",
    "whole frames, even in time",
    "random",
)
CONTROLS = DRAWN[5:]
RATIOS = (0.5, 0.9, 0.98)


def page(captions: Sequence[CaptionRecord], frames: int) -> str:
    """Return the page in Markdown."""
    summaries = summarised(captions)
    words = sum(len(summary.caption) for summary in captions)
    reference = summaries["everything", 0.0, "original"]
    lines = [
        "# Tokens that the guidance needs",
        "",
        "Written by `make bench-guided`. The embedded video model describes "
        f"{len(captions)} held-out clips of {frames} frames ({36 * frames:,} visual tokens, {words:,} words in all). "
        "Its draft sees a part of the tokens and predicts each word from the words before it. *Accepted* is the "
        "share of words that it predicts as the target said them (95 % interval over clips), *closed* the same where "
        "the gaps between its tokens are closed, *run* the words before the first wrong one; "
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
        "Share of captions by kind of the first wrong word, a tenth of the tokens kept.",
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
    original, closed = (summaries[name, ratio, places] for places in ("original", "renumbered"))
    kinds = [
        f"{100 * original.by_kind[kind]:.0f}" if kind in original.by_kind else "-" for kind in KINDS
    ]
    cells = [
        original.accepted.percent,
        f"{100 * closed.accepted.value:.1f}",
        f"{original.run:.1f}",
        f"{100 * original.objects:.0f} %",
        f"{100 * original.events:.0f} %",
        *kinds,
    ]
    return f"| {name} | " + " | ".join(cells) + " |"


def write_page(captions: Sequence[CaptionRecord], frames: int, folder: Path) -> None:
    """Write `guided.md`, `guided.json` and `speculative/guided.png` into a folder."""
    summaries = summarised(captions)
    settings = [
        {"kept": name, "ratio": ratio, "positions": places, **asdict(summary)}
        for (name, ratio, places), summary in summaries.items()
    ]
    result = {
        "conditions": conditions("cpu"),
        "clips": len(captions),
        "frames": frames,
        "settings": settings,
    }
    leave(folder, "guided", page(captions, frames), result)
    (folder / "speculative").mkdir(exist_ok=True)
    with matplotlib.rc_context(STYLE):
        draw(summaries, len(captions)).savefig(folder / "speculative" / "guided.png", dpi=200)


def draw(summaries: Mapping[Setting, Guided], clips: int) -> Figure:
    """Return the figure: words accepted by what is kept and how much of it."""
    everything = summaries["everything", 0.0, "original"].accepted
    rows = {
        (name, f"{100 * (1 - ratio):.4g} %"): [
            Estimate.percent(
                summaries[name, ratio, "original"].accepted,
                Mark.OPEN if name in CONTROLS else Mark.METHOD,
            )
        ]
        for name in DRAWN
        for ratio in sorted({ratio for of, ratio, _ in summaries if of == name})
        if ratio in RATIOS
    }
    line, *band = (100 * end for end in (everything.value, everything.low, everything.high))
    panel = GridPanel("", rows, line, (band[0], band[1]))
    return draw_grid(
        PictureGrid(
            "What does a draft have to see of a video? (embedded pair)",
            f"words predicted (%), with 95 % intervals over {clips} clips; left: visual tokens that it sees",
            [panel],
            {Mark.METHOD: "guided", Mark.OPEN: "control"},
            "all tokens, with its interval",
        )
    )
