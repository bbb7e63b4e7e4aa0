"""RTPrune (ICML 2026, arXiv 2605.00392), Tables 4 and 7: DeepSeek-OCR Base and Large.

An image of h x h cells has h² + h + 1 positions, including newlines and a separator, plus 10 words: 27 more than cells
in mode Base, 31 in Large. Tokens are removed before layer 0; baselines that read layers first are unpruned up to
there. Layer 0 is dense, 11 layers have experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from espalier.harness.cost.flops import rtprune
from espalier.harness.errors import UserError
from espalier.harness.reports.tables.published_tables import PrintedCell
from lab.analytic.analytic_models import exact, text_stack
from lab.analytic.analytic_sheet import PrintedSheet, full_match
from lab.analytic.analytic_verdicts import (
    ROUNDING,
    FormulaClaim,
    column,
    quotient,
)

#: Rows of cells of an image by mode.
GRID = {"DeepSeek-OCR-Base": 16, "DeepSeek-OCR-Large": 20}
WORDS = 10

#: Unpruned layers of each baseline of Table 4: SparseVLM's are guessed, the others follow from the figures.
UNPRUNED_LAYERS = {"FitPrune": 4, "FastV": 2, "DART": 2, "SparseVLM": 6}

#: Tokens of mode Large in Table 7, before and after: no integers give its twelve figures, these do.
LARGE = (430.15, 331.02)

LAYER = re.compile(r"attention pruning at layer (\d+)")
COUNT = re.compile(r"\D*(\d+)(?: visual)? tokens")

#: Mode Large: its unpruned figure is 0.136 above the formula for 431 tokens, as are those with unpruned layers.
LARGE_TOLERANCE = 0.15
LARGE_WHY = "mode Large with whole layers was counted with other lengths than it prints"


def claims(folder: Path) -> Iterator[FormulaClaim]:
    """Yield the formulas' claims on both tables."""
    fourth, seventh = (PrintedSheet.read(folder, "rtprune", number) for number in ("4", "7"))
    yield from column(
        fourth, "total tokens", total, "h²+h+1+10", why="a whole number", fitted="10 words"
    )
    for cell in fourth.column("GFLOPs"):
        unpruned = cell.method == "Baseline" or cell.method in UNPRUNED_LAYERS
        fitted = "whole layers" if cell.method in UNPRUNED_LAYERS else ""
        yield _gflops(cell, _entering(cell), unpruned, fitted)
    for cell in fourth.column("prefill speedup"):
        figure = fourth.sibling(cell, metric="prefill time")
        (plain,) = fourth.column("prefill time", model=cell.model, method="Baseline")
        yield quotient(cell, plain, figure)
    for cell in seventh.column("GFLOPs"):
        large = cell.model == "DeepSeek-OCR-Large" and cell.method != "Baseline"
        fitted = "430.15 and 331.02 tokens" if large else ""
        yield _gflops(cell, _by_layer(cell), cell.method == "Baseline", fitted)
    yield from _overall(seventh)


def total(cell: PrintedCell) -> float:
    """Return the positions of a prompt with an image that keeps the row's number of cells."""
    return int(full_match(cell, COUNT, "budget")[1]) + _rows(cell) + 1 + WORDS


def _rows(cell: PrintedCell) -> int:
    """Return the rows of cells of an image."""
    if cell.model not in GRID:
        raise UserError(f"{cell.name}: model={cell.model!r}; valid: {', '.join(GRID)}")
    return GRID[cell.model]


def _full(cell: PrintedCell) -> float:
    """Return the positions of an unpruned prompt."""
    return float(_rows(cell) ** 2 + _rows(cell) + 1 + WORDS)


def _gflops(cell: PrintedCell, tokens: list[float], loose: bool, fitted: str) -> FormulaClaim:
    """Return the claim on a GFLOPs cell, (25)."""
    loose = loose and cell.model == "DeepSeek-OCR-Large"
    if loose:
        fitted = ", ".join(filter(None, (fitted, "tolerance")))
    stack = text_stack("deepseek_ocr_base")  # of every mode
    return FormulaClaim(
        cell,
        rtprune(stack, tokens) / 1e9,
        LARGE_TOLERANCE if loose else cell.half,
        "GFLOPs",
        "(20) to (25)",
        LARGE_WHY if loose else ROUNDING,
        exact(stack, tokens) / 1e9,
        fitted,
    )


def _entering(cell: PrintedCell) -> list[float]:
    """Return the tokens that enter each layer in Table 4."""
    full = _full(cell)
    unpruned_layers = UNPRUNED_LAYERS.get(cell.method, 0)
    kept_tokens = total(cell)
    if cell.method == "SparseVLM":  # prints 363 tokens, and its FLOPs are counted with them
        kept_tokens -= 4
    return [full] * unpruned_layers + [kept_tokens] * (12 - unpruned_layers)


def _by_layer(cell: PrintedCell) -> list[float]:
    """Return the tokens that enter each layer in Table 7, where they are removed after a layer."""
    full = _full(cell)
    if cell.method == "Baseline":
        return [full] * 12
    kept_tokens = total(cell)
    if cell.model == "DeepSeek-OCR-Large":
        full, kept_tokens = LARGE
    unpruned_layers = int(full_match(cell, LAYER, "method")[1]) + 1
    return [full] * unpruned_layers + [kept_tokens] * (12 - unpruned_layers)


def _overall(sheet: PrintedSheet) -> Iterator[FormulaClaim]:
    """Yield the claims of (19) on the overall scores: the mean of three parts; the first is a distance."""
    for cell in sheet.column("overall"):
        text, formula, tables = (
            sheet.sibling(cell, metric=name) for name in ("text_edit", "formula_cdm", "table_teds")
        )
        yield FormulaClaim(
            cell,
            (100 * (1 - text.number) + formula.number + tables.number) / 3,
            cell.half + (100 * text.half + formula.half + tables.half) / 3,
            "overall",
            "(19)",
            why="rounding of all four cells",
        )
