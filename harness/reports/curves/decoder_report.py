"""Tables and figures of speculative decoders.

`python -m espalier.harness.reports.curves.decoder_report --store results --write lab/measured/speculative`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from espalier.harness.errors import UserError, plain_page
from espalier.harness.paths import DEFAULT_STORE
from espalier.harness.reports.curves.curve_files import RESOLUTION
from espalier.harness.reports.curves.decoder_bars import draw_decoders
from espalier.harness.reports.curves.decoder_drafts import draw_guidance, draw_ratio
from espalier.harness.reports.curves.decoder_looks import setting_line
from espalier.harness.reports.curves.decoder_rows import (
    GUIDED,
    DecoderResult,
    acceptance,
    decoders,
    guidances,
    ratios,
    read_decoders,
)
from espalier.harness.reports.curves.plot_style import STYLE
from espalier.harness.reports.curves.speculative_table import figures, headings
from espalier.harness.reports.curves.stored_rows import WHERE, read_results
from espalier.harness.specs.commands import RUN, command
from espalier.harness.specs.comparable import amount, passed_over
from espalier.harness.store.files.folder_checks import check_folder, existing_store

#: The sweep that produces the results of a part.
PRESETS = {
    "decoders": "+experiment=speculative",
    "ratio": "+experiment=speculative_ratio",
    "guidance": "+experiment=speculative_guidance",
}

INTRO = """\
# Speculative decoding, measured

Written by `python -m espalier.harness.reports.curves.decoder_report`; docs/speculative.md defines the figures. Ratio
is the share of visual
tokens that the draft does without, T_p and T_q are milliseconds of one step of the target and of the draft,
speed-ups are over plain decoding of the same answers, and `differ` counts answers that are not those of plain decoding.
"""


def write_decoders(
    store: Path, folder: Path, model: str | None = None, where: Sequence[str] = ()
) -> tuple[list[Path], list[str]]:
    """Write `README.md` and up to three figures (`decoders`, `ratio`, `guidance`, each .png and .svg) into `folder`.

    Args:
        store: root of the run store.
        folder: created if needed.
        model: required if the store has several.
        where: `key=value` conditions on settings (harness/reports/curves/stored_rows.py).

    Returns:
        The paths written, and a line for each part that is missing.

    Raises:
        UserError: the store has no results of a decoder, or of several models and `model` is None, or results differ in
            a setting that must be the same.
    """
    cells = read_decoders(store, model, where)
    by_benchmark, by_ratio, by_guidance = decoders(cells), ratios(cells), guidances(cells)
    folder.mkdir(parents=True, exist_ok=True)
    written, parts, missing = [], [INTRO], []
    with rc_context(STYLE):
        bars = {
            name: with_speedup
            for name, group in by_benchmark.items()
            if (with_speedup := _with_speedup(group))
        }
        for name, figure in (
            ("decoders", draw_decoders(bars) if bars else None),
            ("ratio", draw_ratio(by_ratio) if by_ratio else None),
            ("guidance", draw_guidance(by_guidance) if by_guidance else None),
        ):
            if figure is None:
                missing.append(f"no rows for {name}; run: {RUN} {PRESETS[name]}")
            else:
                written += _save(figure, folder / name)
    missing += _omitted(store, cells, [*chain(*by_benchmark.values()), *by_ratio, *by_guidance])
    if by_benchmark:
        parts.append(_decoders_part(by_benchmark, pictured=bool(bars)))
    if by_ratio:
        title = f"## {GUIDED} by the share of visual tokens its draft does without"
        parts.append(f"{title}\n\n![{GUIDED} by ratio](ratio.png)\n\n{_table(by_ratio)}")
    if by_guidance:
        title = "## What chooses the draft's visual tokens"
        parts.append(f"{title}\n\n![By guidance](guidance.png)\n\n{_accepted(by_guidance)}")
    if missing:
        parts.append("## Left out\n\n" + "\n".join(f"- {line}" for line in missing) + "\n")
    page = folder / "README.md"
    page.write_text(plain_page("\n".join(parts)), encoding="utf-8")
    return [*written, page], missing


def _omitted(
    store: Path, cells: Sequence[DecoderResult], displayed: Sequence[DecoderResult]
) -> list[str]:
    """Return a line on results without settings, and one on results that no part shows."""
    without_settings = [result for result in read_results(store) if "settings" not in result.row]
    decoders_without_settings = [
        result for result in without_settings if result.row["extra"].get("speculative")
    ]
    not_shown = {cell.path for cell in cells} - {cell.path for cell in displayed}
    return [
        *passed_over(len(decoders_without_settings), "without settings, from an older version"),
        *passed_over(
            len(not_shown),
            "no piece shows them (older ones of a cell, other drafts, windows, answers or machines)",
        ),
    ]


def _with_speedup(cells: Sequence[DecoderResult]) -> list[DecoderResult]:
    """Return results with a speed-up: plain decoding has none over itself."""
    return [cell for cell in cells if cell.block["speedup_decode"] is not None]


def _save(figure: Figure, path: Path) -> list[Path]:
    png, svg = path.with_suffix(".png"), path.with_suffix(".svg")
    figure.savefig(png, dpi=RESOLUTION)
    # No date, and a fixed salt in the style: equal data gives equal bytes.
    figure.savefig(svg, metadata={"Date": None})
    return [png, svg]


def _decoders_part(by_benchmark: dict[str, list[DecoderResult]], pictured: bool) -> str:
    parts = ["## Decoders\n"]
    if pictured:
        parts.append("![Decode speed-up of the decoders](decoders.png)\n")
    for name, cells in by_benchmark.items():
        parts += [f"### {name}\n", _table(cells)]
    return "\n".join(parts)


def _table(cells: Sequence[DecoderResult]) -> str:
    """Return the figures of `espalier.harness.reports.curves.speculative_table`, one line for each result."""
    lines = [
        f"{setting_line(cells)}.\n",
        f"| method | ratio | {' | '.join(headings())} |",
        "| --- |" + " ---: |" * (len(headings()) + 1),
    ]
    for cell in cells:
        lines.append(f"| {cell.name} | {amount(cell.row)} | {' | '.join(figures(cell.row))} |")
    return "\n".join(lines) + "\n"


def _accepted(cells: Sequence[DecoderResult]) -> str:
    """Return the acceptance of each guidance; times are in the other tables."""
    lines = [
        f"{setting_line(cells)}. Percent of judged tokens accepted, with the 95 % bootstrap interval over answers.\n",
        "| guidance | L | ratio | accepted | mean run |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for cell in sorted(
        cells, key=lambda result: (result.params["L"] or 0, result.ratio, result.name)
    ):
        end, run = acceptance(cell), cell.block.get("mean_run")
        accepted = "-" if end is None else end.percent
        depth = "its own" if cell.params["L"] is None else cell.params["L"]
        mean = "-" if run is None else f"{run:.2f}"
        lines.append(
            f"| {cell.params['guidance']} | {depth} | {amount(cell.row)} | {accepted} | {mean} |"
        )
    return "\n".join(lines) + "\n"


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Write tables and figures of a store's decoders; exit code 2 and one line if that fails."""
    parser = argparse.ArgumentParser(
        prog="python -m espalier.harness.reports.curves.decoder_report", description=__doc__
    )
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE, help="the run store")
    parser.add_argument("--write", type=Path, required=True, help="folder of tables and pictures")
    parser.add_argument("--model", help="which model, if the store has several")
    parser.add_argument("--where", action="append", default=[], help=WHERE)
    options = parser.parse_args(argv)
    try:
        check_folder("--write", options.write)
        paths, missing = write_decoders(
            existing_store(options.store), options.write, options.model, options.where
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in paths:
        print(path)
    for line in missing:
        print(f"left out: {line}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
