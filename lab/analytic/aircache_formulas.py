"""AirCache (ICCV 2025, arXiv 2503.23956), Tables 3 and 9: latency and throughput of 512 output tokens.

    throughput = batch * 512 / decoding latency

and percentages are changes of printed numbers against the full cache. Decoding latencies of Table 3 (LLaVA-OV-7B)
follow a line in batch and cache, fitted to its 21 cells:

    7.71 s + 0.103 s B + 0.102 s B n / 1000,    n = 64 + k (P - 64) + 256

where B is the batch, P the prompt's length, 64 its words, k the share of visual entries kept, 256 half of the answer.
Those of InternVL2-8B in Table 9 follow no line: 8 prompts of 32k take 46.2 s, 16 of 16k, with the same cache, 28.5 s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from espalier.harness.reports.tables.published_tables import PrintedCell
from lab.analytic.analytic_sheet import PrintedSheet, full_match, kept
from lab.analytic.analytic_verdicts import FormulaClaim, column

OUTPUT, WORDS = 512, 64
SETTING = re.compile(r"batch (\d+), prompt (\d+)k")
CHANGE = " printed change vs Full"


def claims(folder: Path) -> Iterator[FormulaClaim]:
    """Yield the formulas' claims on both tables."""
    yield from _videos(folder)
    third, ninth = (PrintedSheet.read(folder, "aircache", number) for number in ("3", "9"))
    yield from column(
        third,
        "decoding latency",
        latency,
        "a line in B and B n",
        1.3,
        "largest error of the fit",
        fitted="3 constants, tolerance",
    )
    for sheet in (third, ninth):
        for cell in sheet.column("throughput"):
            seconds = sheet.sibling(cell, metric="decoding latency")
            batch, _ = setting(cell)
            yield FormulaClaim(
                cell,
                batch * OUTPUT / seconds.number,
                1.0,
                "throughput",
                "B 512 / latency",
                "rounded or cut to a whole number",
            )
        for metric in ("prefill latency", "decoding latency", "throughput"):
            for cell in sheet.column(metric + CHANGE):
                yield _change(sheet, cell, metric)


def _videos(folder: Path) -> Iterator[FormulaClaim]:
    """Yield the claims that tables 2 and 4 print Table 10's overall score of MMBench-Video."""
    overall = {
        (cell.method, cell.column): cell
        for cell in PrintedSheet.read(folder, "aircache", "10").column("score", split="Overall")
    }
    for number in ("2", "4"):
        sheet = PrintedSheet.read(folder, "aircache", number)
        for cell in sheet.column("score", benchmark="MMBench-Video"):
            column = "100%" if cell.method == "Full" else cell.column
            overall_cell = overall.get((cell.method, column))
            if overall_cell is not None:
                yield FormulaClaim(
                    cell, overall_cell.number, 0.0, "MMBench-Video", "Table 10", "the same figure"
                )


def setting(cell: PrintedCell) -> tuple[int, int]:
    """Return the batch and the prompt length in tokens of a row."""
    match = full_match(cell, SETTING, "split")
    return int(match[1]), 1024 * int(match[2])


def latency(cell: PrintedCell) -> float:
    """Return the fitted line's decoding latency in seconds."""
    batch, prompt = setting(cell)
    entries = WORDS + kept(cell) * (prompt - WORDS) + OUTPUT / 2
    return 7.71 + 0.103 * batch + 0.102 * batch * entries / 1000


def _change(sheet: PrintedSheet, cell: PrintedCell, metric: str) -> FormulaClaim:
    """Return the claim that a percentage is the change between two printed numbers."""
    figure = sheet.sibling(cell, metric=metric)
    full = sheet.sibling(figure, method="Full", budget="100% visual KV")
    value = 100 * (figure.number / full.number - 1)
    return FormulaClaim(cell, value, cell.half, metric + CHANGE, "change of printed figures")
