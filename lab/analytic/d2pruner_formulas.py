"""D2Pruner (AAAI 2026, arXiv 2512.19443), Table 4: LLaVA-NeXT-7B on POPE.

Tokens are removed before decoder layer K = 2 of 32; 33 words are fitted (any of 30 to 42 give the three rounded
figures, 33 also the ratios), of 2,880 visual tokens. K = 0, 1 or 3 and a three-matrix MLP do not give them.

The KV column ignores the unpruned layers, which the FLOPs column includes: c (2880 k + t) MB with c = 0.514 and t =
62.1, fitted to these three cells. 16-bit keys and values take 0.5243 MB a token; the exact bytes have both unpruned
layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from espalier.harness.cost.flops import d2pruner
from espalier.harness.reports.tables.published_tables import PrintedCell
from lab.analytic.analytic_models import exact, text_stack
from lab.analytic.analytic_sheet import PrintedSheet, kept
from lab.analytic.analytic_verdicts import (
    FormulaClaim,
    column,
    quotient,
)

VISUAL, TEXT, K = 2880, 33, 2

#: What was fitted to the FLOPs columns.
WORDS = "33 words, 2 whole layers"

#: MB per token, and the number of other than visual tokens, of the KV column.
KV_MB, KV_TEXT = 0.514, 62.1

#: Columns that are ratios: the unpruned model's value divided by the method's.
FACTORS = {
    "prefill time reduction factor": "prefill time",
    "total time reduction factor": "total time",
    "KV cache reduction factor": "KV cache",
}


def claims(folder: Path) -> Iterator[FormulaClaim]:
    """Yield the formulas' claims on Table 4."""
    sheet = PrintedSheet.read(folder, "d2pruner", "4")
    yield from column(
        sheet,
        "FLOPs",
        lambda cell: _tera(_entering(cell)),
        "4nd²+2n²d+2ndm",
        exact=_exact_tera,
        fitted=WORDS,
    )
    unpruned = _tera([VISUAL + TEXT] * 32)
    yield from column(
        sheet,
        "FLOPs reduction factor",
        lambda cell: unpruned / _tera(_entering(cell)),
        "4nd²+2n²d+2ndm",
        fitted=WORDS,
    )
    yield from column(
        sheet,
        "KV cache",
        lambda cell: KV_MB * (round(kept(cell) * VISUAL) + KV_TEXT),
        "c(2880k+t)",
        exact=_exact_mb,
        fitted="c and t",
    )
    for factor, metric in FACTORS.items():
        for cell in sheet.column(factor):
            figure = sheet.sibling(cell, metric=metric)
            plain = sheet.sibling(figure, method="Vanilla", budget="100% visual tokens")
            yield quotient(cell, plain, figure)


def _entering(cell: PrintedCell) -> list[float]:
    """Return the number of tokens that enter each layer."""
    return [float(VISUAL + TEXT)] * K + [float(round(kept(cell) * VISUAL) + TEXT)] * (32 - K)


def _tera(tokens: list[float]) -> float:
    return d2pruner(text_stack("llava_next_7b"), tokens) / 1e12


def _exact_tera(cell: PrintedCell) -> float:
    return exact(text_stack("llava_next_7b"), _entering(cell)) / 1e12


def _exact_mb(cell: PrintedCell) -> float:
    """Return the size of the 16-bit keys and values of all layers, in MB of 10^6 bytes."""
    stack = text_stack("llava_next_7b")
    return 2 * 2 * stack.kv_heads * stack.head_dim * sum(_entering(cell)) / 1e6
