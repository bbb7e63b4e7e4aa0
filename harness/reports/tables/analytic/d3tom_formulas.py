"""D3ToM (AAAI 2026, arXiv 2511.12280), Tables 2 and 5: LaViDa-LLaDA-8B on LLaVA-Bench.

32 steps of 64 words behind 64 of prompt and a nominal 1,000 visual tokens, merged in layer 3: sizes that the paper does
not print are those that all figures fit (MLP width 12,288, as LLaDA-8B has). Shares are taken as printed, 0.333 and not
a third. Methods that wait for deciders, and FastV, run their first step whole (17), (24).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from espalier.harness.cost.denoising_cost import DenoisingCost, even, rising
from espalier.harness.cost.facts import StackFacts
from espalier.harness.cost.flops import mlp_flops, quadratic
from espalier.harness.errors import UserError
from espalier.harness.reports.tables.analytic.analytic_models import text_stack
from espalier.harness.reports.tables.analytic.analytic_sheet import Sheet, kept
from espalier.harness.reports.tables.analytic.analytic_verdicts import Claim, quotient
from espalier.harness.reports.tables.printed_cell import Cell

#: d, m, L, T, N_v, N_p + N_g.
PAPER = DenoisingCost(4096, 12288, 32, 32, 1000, 128)

#: Layer K of Table 2, and what Table 5 calls it.
K = 3
LABEL = re.compile(r"D3ToM \(merge layer index (\d+), fitted\)")

#: What of the TFLOPs columns was fitted to them.
SIZES = "visual tokens, words, steps, MLP width"

#: TFLOPs; a share printed as 33.3 % may have been counted with more digits, and PDrop takes its cube.
TOLERANCE, OF_PDROP = 0.0055, 0.0085
WHY = "rounding of the printed cell, and of the share kept"


@dataclass(frozen=True)
class ExactCost(DenoisingCost):
    """The same runs with the exact count of a layer, two FLOPs a multiply-add; (15) counts its products so already."""

    stack: StackFacts | None = None

    def _attention(self, visual: float) -> float:
        assert self.stack is not None
        (linear, pairs), n = quadratic(self.stack), visual + self.text
        return (linear - mlp_flops(self.stack)) * n + pairs * n * n

    def _mlp(self, visual: float) -> float:
        assert self.stack is not None
        return mlp_flops(self.stack) * (visual + self.text)


def claims(folder: Path) -> Iterator[Claim]:
    """Yield what the formulas say of both tables."""
    second, fifth = (Sheet.read(folder, "d3tom", number) for number in ("2", "5"))
    exact = ExactCost(**vars(PAPER), stack=text_stack("llada_v_8b"))
    for sheet in (second, fifth):
        for cell in sheet.column("TFLOPs"):
            allowed = OF_PDROP if cell.method == "PDrop" else TOLERANCE
            count = tera(exact, cell)
            sizes = SIZES if sheet is second else f"{SIZES}, labels of layers"
            yield Claim(
                cell, tera(PAPER, cell), allowed, "TFLOPs", "(12) to (26)", WHY, count, sizes
            )
        for metric in ("TFLOPs relative", "time relative"):
            for cell in sheet.column(metric):
                own = sheet.beside(cell, metric=metric.removesuffix(" relative"))
                yield _percent(cell, own, sheet)
    yield from _repeated(second, fifth)
    yield from _relative(fifth)


def tera(cost: DenoisingCost, cell: Cell) -> float:
    """Return the TFLOPs of the run that a row describes; a share of 1 is a whole run."""
    ratio, layer = 1 - kept(cell), K
    method = cell.method
    if found := LABEL.fullmatch(method):
        method, layer = "D3ToM", int(found[1])
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


def _percent(cell: Cell, own: Cell, sheet: Sheet) -> Claim:
    """Return the claim that a cell is a printed figure over LaViDa's, in percent."""
    plain = sheet.beside(own, method="LaViDa", budget="100% tokens")
    found = quotient(cell, own, plain)
    lost = found.value * (own.half / own.number + plain.half / plain.number)
    return Claim(
        cell, 100 * found.value, cell.half + 100 * lost, cell.metric, found.source, found.why
    )


def _repeated(second: Sheet, fifth: Sheet) -> Iterator[Claim]:
    """Yield the claims that times of layer 3 in Table 5 are those of Table 2, which has the same runs."""
    for cell in fifth.column("time"):
        method = cell.method.replace("D3ToM (merge layer index 3, fitted)", "D3ToM")
        if method in ("D3ToM", "LaViDa"):
            twin = second.beside(cell, table="2", method=method)
            yield Claim(cell, twin.number, 0.0, "time", "Table 2, the same run", why="a copy")


def _relative(fifth: Sheet) -> Iterator[Claim]:
    """Yield the claims that the last column is the mean of four accuracies over LaViDa's."""
    for cell in fifth.column("relative performance"):
        own = [one for one in fifth.column("accuracy", method=cell.method, budget=cell.budget)]
        plain = [fifth.beside(one, method="LaViDa", budget="100% tokens") for one in own]
        ratios = [a.number / b.number for a, b in zip(own, plain, strict=True)]
        lost = fmean(a.half / b.number for a, b in zip(own, plain, strict=True))
        yield Claim(
            cell,
            100 * fmean(ratios),
            cell.half + 200 * lost,
            cell.metric,
            "mean of four ratios",
            why="rounding of the cell and of the accuracies",
        )
