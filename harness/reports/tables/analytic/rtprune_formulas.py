"""RTPrune (ICML 2026, arXiv 2605.00392), Tables 4 and 7: DeepSeek-OCR Base and Large.

An image of h x h cells has h² + h + 1 positions, newlines and a separator included, and 10 words stand beside it: 27
more than cells in mode Base, 31 in Large. Tokens leave before layer 0; baselines that look at layers first are whole
up to there. Layer 0 is dense, 11 layers have experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from espalier.harness.cost.paper_flops import rtprune
from espalier.harness.errors import UserError
from espalier.harness.reports.tables.analytic.analytic_models import exact, text_stack
from espalier.harness.reports.tables.analytic.analytic_sheet import Sheet, fits
from espalier.harness.reports.tables.analytic.analytic_verdicts import (
    ROUNDING,
    Claim,
    column,
    quotient,
)
from espalier.harness.reports.tables.printed_cell import Cell

#: Rows of cells of an image by mode.
GRID = {"DeepSeek-OCR-Base": 16, "DeepSeek-OCR-Large": 20}
WORDS = 10

#: Layers that a baseline of Table 4 leaves whole: SparseVLM's are guessed, the others follow from the figures.
WHOLE = {"FitPrune": 4, "FastV": 2, "DART": 2, "SparseVLM": 6}

#: Tokens of mode Large in Table 7, before and after: no whole numbers give its twelve figures, these do.
LARGE = (430.15, 331.02)

LAYER = re.compile(r"attention pruning at layer (\d+)")
COUNT = re.compile(r"\D*(\d+)(?: visual)? tokens")

#: Mode Large: its unpruned figure is 0.136 above the formula of 431 tokens, those that contain whole layers follow it.
LARGE_TOLERANCE = 0.15
LARGE_WHY = "mode Large with whole layers was counted with other lengths than it prints"


def claims(folder: Path) -> Iterator[Claim]:
    """Yield what the formulas say of both tables."""
    fourth, seventh = (Sheet.read(folder, "rtprune", number) for number in ("4", "7"))
    yield from column(
        fourth, "total tokens", total, "h²+h+1+10", why="a whole number", fitted="10 words"
    )
    for cell in fourth.column("GFLOPs"):
        whole = cell.method == "Baseline" or cell.method in WHOLE
        fitted = "whole layers" if cell.method in WHOLE else ""
        yield _gflops(cell, _entering(cell), whole, fitted)
    for cell in fourth.column("prefill speedup"):
        own = fourth.beside(cell, metric="prefill time")
        (plain,) = fourth.column("prefill time", model=cell.model, method="Baseline")
        yield quotient(cell, plain, own)
    for cell in seventh.column("GFLOPs"):
        large = cell.model == "DeepSeek-OCR-Large" and cell.method != "Baseline"
        fitted = "430.15 and 331.02 tokens" if large else ""
        yield _gflops(cell, _by_layer(cell), cell.method == "Baseline", fitted)
    yield from _overall(seventh)


def total(cell: Cell) -> float:
    """Return the positions of a prompt whose image keeps as many cells as the row says."""
    return int(fits(cell, COUNT, "budget")[1]) + _rows(cell) + 1 + WORDS


def _rows(cell: Cell) -> int:
    """Return the rows of cells of an image."""
    if cell.model not in GRID:
        raise UserError(f"{cell.name}: model={cell.model!r}; valid: {', '.join(GRID)}")
    return GRID[cell.model]


def _full(cell: Cell) -> float:
    """Return the positions of an unpruned prompt."""
    return float(_rows(cell) ** 2 + _rows(cell) + 1 + WORDS)


def _gflops(cell: Cell, tokens: list[float], loose: bool, fitted: str) -> Claim:
    """Return the claim on a GFLOPs cell, (25)."""
    loose = loose and cell.model == "DeepSeek-OCR-Large"
    if loose:
        fitted = ", ".join(filter(None, (fitted, "tolerance")))
    stack = text_stack("deepseek_ocr_base")  # of every mode
    return Claim(
        cell,
        rtprune(stack, tokens) / 1e9,
        LARGE_TOLERANCE if loose else cell.half,
        "GFLOPs",
        "(20) to (25)",
        LARGE_WHY if loose else ROUNDING,
        exact(stack, tokens) / 1e9,
        fitted,
    )


def _entering(cell: Cell) -> list[float]:
    """Return the tokens that enter each layer in Table 4."""
    full = _full(cell)
    whole = WHOLE.get(cell.method, 0)
    left = total(cell)
    if cell.method == "SparseVLM":  # prints 363 tokens, and its FLOPs are counted with them
        left -= 4
    return [full] * whole + [left] * (12 - whole)


def _by_layer(cell: Cell) -> list[float]:
    """Return the tokens that enter each layer in Table 7, where they leave behind a layer."""
    full = _full(cell)
    if cell.method == "Baseline":
        return [full] * 12
    left = total(cell)
    if cell.model == "DeepSeek-OCR-Large":
        full, left = LARGE
    whole = int(fits(cell, LAYER, "method")[1]) + 1
    return [full] * whole + [left] * (12 - whole)


def _overall(sheet: Sheet) -> Iterator[Claim]:
    """Yield what (19) says of the overall scores: the mean of three parts, of which the first is a distance."""
    for cell in sheet.column("overall"):
        text, formula, tables = (
            sheet.beside(cell, metric=name) for name in ("text_edit", "formula_cdm", "table_teds")
        )
        yield Claim(
            cell,
            (100 * (1 - text.number) + formula.number + tables.number) / 3,
            cell.half + (100 * text.half + formula.half + tables.half) / 3,
            "overall",
            "(19)",
            why="rounding of all four cells",
        )
