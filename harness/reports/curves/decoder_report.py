"""Tables and figures of speculative decoders.

`python -m espalier.harness.reports.curves.decoder_report --store results --write lab/measured/speculative`
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from espalier.harness.reports.curves.curve_table import markdown_table
from espalier.harness.reports.curves.decoder_figures import (
    draw_decoders,
    draw_guidance,
    draw_ratio,
    setting_line,
)
from espalier.harness.reports.curves.decoder_results import (
    GUIDED,
    accepted_share,
    decoders,
    guidances,
    ratios,
    read_decoders,
)
from espalier.harness.reports.curves.report_page import (
    Written,
    missing_parts,
    report_command,
    texts,
    write_page,
)
from espalier.harness.reports.curves.speculative_table import figures, headings
from espalier.harness.reports.curves.stored_rows import read_results
from espalier.harness.specs.comparable import amount, passed_over

#: The sweep that produces the results of a part.
PRESETS = {
    "decoders": "+experiment=speculative",
    "ratio": "+experiment=speculative_ratio",
    "guidance": "+experiment=speculative_guidance",
}

(INTRO,) = texts("decoders")

NOT_SHOWN = "no piece shows them (older ones of a cell, other drafts, windows, answers or machines)"


def write_decoders(
    store: Path, folder: Path, model: str | None = None, where: Sequence[str] = ()
) -> Written:
    """Write `README.md` and up to three figures (`PRESETS`) of a store's decoders; Raises as `read_decoders`."""
    frame = read_decoders(store, model, where)
    by_benchmark, by_ratio, by_guidance = decoders(frame), ratios(frame), guidances(frame)
    # Plain decoding has no speed-up over itself.
    timed = {name: cells[cells.speedup_decode.notna()] for name, cells in by_benchmark.items()}
    timed = {name: cells for name, cells in timed.items() if len(cells)}
    displayed = pd.concat([*by_benchmark.values(), by_ratio, by_guidance])
    older = [
        result
        for result in read_results(store)
        if "settings" not in result.row and result.row["extra"].get("speculative")
    ]
    missing = [
        *missing_parts(PRESETS, (timed, len(by_ratio), len(by_guidance))),
        *passed_over(len(older), "without settings, from an older version"),
        *passed_over(len(set(frame.index) - set(displayed.index)), NOT_SHOWN),
    ]
    parts, pictures = [INTRO], {}
    if by_benchmark:
        parts.append("## Decoders\n")
    if timed:
        pictures["decoders"] = draw_decoders(timed)
        parts.append("![Decode speed-up of the decoders](decoders.png)\n")
    parts += [f"### {name}\n\n{_table(cells)}" for name, cells in by_benchmark.items()]
    if len(by_ratio):
        pictures["ratio"] = draw_ratio(by_ratio)
        title = f"## {GUIDED} by the share of visual tokens its draft does without"
        parts.append(f"{title}\n\n![{GUIDED} by ratio](ratio.png)\n\n{_table(by_ratio)}")
    if len(by_guidance):
        pictures["guidance"] = draw_guidance(by_guidance)
        title = "## What chooses the draft's visual tokens"
        parts.append(f"{title}\n\n![By guidance](guidance.png)\n\n{_accepted(by_guidance)}")
    return write_page(folder, parts, pictures, missing)


def _table(cells: pd.DataFrame) -> str:
    """Return the figures of `speculative_table`, one line for each result."""
    lines = [
        [cell.curve, amount(cell.result.row), *figures(cell.result.row)]
        for cell in cells.itertuples()
    ]
    table = markdown_table(["method", "ratio", *headings()], lines)
    return f"{setting_line(cells)}.\n\n{table}"


def _accepted(cells: pd.DataFrame) -> str:
    """Return the acceptance of each guidance; times are in the other tables."""
    depths = cells.L.map(lambda layer: layer or 0)
    ordered = cells.assign(depth=depths).sort_values(["depth", "ratio", "curve"])
    lines = []
    for cell in ordered.itertuples():
        share, run = accepted_share(cell.result), cell.accepted_run
        accepted = "-" if share is None else share.percent
        depth = "its own" if cell.L is None else str(cell.L)
        mean = "-" if run is None else f"{run:.2f}"
        lines.append([cell.guidance, depth, amount(cell.result.row), accepted, mean])
    words = "Percent of judged tokens accepted, with the 95 % bootstrap interval over answers."
    table = markdown_table(["guidance", "L", "ratio", "accepted", "mean run"], lines)
    return f"{setting_line(cells)}. {words}\n\n{table}"


main = report_command("decoder_report", __doc__, write_decoders)

if __name__ == "__main__":
    sys.exit(main())
