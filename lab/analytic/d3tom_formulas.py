"""D3ToM (AAAI 2026, arXiv 2511.12280), Tables 2 and 5: LaViDa-LLaDA-8B on LLaVA-Bench.

32 steps of 64 words after a prompt of 64 words and a nominal 1,000 visual tokens, merged in layer 3: sizes that the
paper does not print are those that fit all figures (MLP width 12,288, as in LLaDA-8B). Shares are used as printed,
0.333 and not a third. Methods that wait for deciders, and FastV, run their first step unpruned (17), (24).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from espalier.harness.cost.facts import StackFacts
from espalier.harness.cost.flops import mlp_flops, quadratic
from espalier.harness.errors import UserError
from espalier.harness.reports.tables.published_tables import PrintedCell
from lab.analytic.analytic_models import text_stack
from lab.analytic.analytic_sheet import PrintedSheet, kept
from lab.analytic.analytic_verdicts import FormulaClaim, quotient
from lab.analytic.denoising_cost import DenoisingCost, even, rising

#: d, m, L, T, N_v, N_p + N_g.
PAPER = DenoisingCost(4096, 12288, 32, 32, 1000, 128)

#: Layer K of Table 2, and its name in Table 5.
K = 3
LABEL = re.compile(r"D3ToM \(merge layer index (\d+), fitted\)")

#: What was fitted to the TFLOPs columns.
SIZES = "visual tokens, words, steps, MLP width"

#: Tolerances in TFLOPs; a share printed as 33.3 % may have had more digits, and PDrop uses its cube.
TOLERANCE, OF_PDROP = 0.0055, 0.0085
WHY = "rounding of the printed cell, and of the share kept"


@dataclass(frozen=True)
class ExactCost(DenoisingCost):
    """The same runs with the exact FLOPs of a layer, two FLOPs per multiply-add, as (15) counts its products."""

    stack: StackFacts | None = None

    def _attention(self, visual: float) -> float:
        assert self.stack is not None
        (linear, pairs), n = quadratic(self.stack), visual + self.text
        return (linear - mlp_flops(self.stack)) * n + pairs * n * n

    def _mlp(self, visual: float) -> float:
        assert self.stack is not None
        return mlp_flops(self.stack) * (visual + self.text)


def claims(folder: Path) -> Iterator[FormulaClaim]:
    """Yield the formulas' claims on both tables."""
    second, fifth = (PrintedSheet.read(folder, "d3tom", number) for number in ("2", "5"))
    exact = ExactCost(**vars(PAPER), stack=text_stack("llada_v_8b"))
    for sheet in (second, fifth):
        for cell in sheet.column("TFLOPs"):
            allowed = OF_PDROP if cell.method == "PDrop" else TOLERANCE
            count = tera(exact, cell)
            sizes = SIZES if sheet is second else f"{SIZES}, labels of layers"
            yield FormulaClaim(
                cell, tera(PAPER, cell), allowed, "TFLOPs", "(12) to (26)", WHY, count, sizes
            )
        for metric in ("TFLOPs relative", "time relative"):
            for cell in sheet.column(metric):
                figure = sheet.sibling(cell, metric=metric.removesuffix(" relative"))
                yield _percent(cell, figure, sheet)
    yield from _repeated(second, fifth)
    yield from _relative(fifth)


def tera(cost: DenoisingCost, cell: PrintedCell) -> float:
    """Return the TFLOPs of the run of a row; a share of 1 is an unpruned run."""
    ratio, layer = 1 - kept(cell), K
    method = cell.method
    if match := LABEL.fullmatch(method):
        method, layer = "D3ToM", int(match[1])
    runs = {
        "LaViDa": cost.unreduced,
        "FastV": lambda: cost.pruning(ratio, layer),
        "PDrop": lambda: cost.pyramid(ratio),
        "VisionZip": lambda: cost.before(ratio),
        "D3ToM": lambda: cost.merging(even(ratio, cost.steps), layer),
        "D3ToM-t": lambda: cost.merging(rising(ratio, cost.steps), layer),
    }
    if method not in runs:
        raise UserError(f"{cell.name}: method={method!r}; valid: {', '.join(runs)}")
    return runs[method]() / 1e12


def _percent(cell: PrintedCell, figure: PrintedCell, sheet: PrintedSheet) -> FormulaClaim:
    """Return the claim that a cell is a printed number relative to LaViDa's, in percent."""
    plain = sheet.sibling(figure, method="LaViDa", budget="100% tokens")
    ratio = quotient(cell, figure, plain)
    error = ratio.value * (figure.half / figure.number + plain.half / plain.number)
    return FormulaClaim(
        cell, 100 * ratio.value, cell.half + 100 * error, cell.metric, ratio.source, ratio.why
    )


def _repeated(second: PrintedSheet, fifth: PrintedSheet) -> Iterator[FormulaClaim]:
    """Yield the claims that times of layer 3 in Table 5 equal those of Table 2, which has the same runs."""
    for cell in fifth.column("time"):
        method = cell.method.replace("D3ToM (merge layer index 3, fitted)", "D3ToM")
        if method in ("D3ToM", "LaViDa"):
            twin = second.sibling(cell, table="2", method=method)
            yield FormulaClaim(
                cell, twin.number, 0.0, "time", "Table 2, the same run", why="a copy"
            )


def _relative(fifth: PrintedSheet) -> Iterator[FormulaClaim]:
    """Yield the claims that the last column is the mean of four accuracies relative to LaViDa's."""
    for cell in fifth.column("relative performance"):
        accuracies = list(fifth.column("accuracy", method=cell.method, budget=cell.budget))
        plain = [
            fifth.sibling(accuracy, method="LaViDa", budget="100% tokens")
            for accuracy in accuracies
        ]
        ratios = [a.number / b.number for a, b in zip(accuracies, plain, strict=True)]
        error = fmean(a.half / b.number for a, b in zip(accuracies, plain, strict=True))
        yield FormulaClaim(
            cell,
            100 * fmean(ratios),
            cell.half + 200 * error,
            cell.metric,
            "mean of four ratios",
            why="rounding of the cell and of the accuracies",
        )
