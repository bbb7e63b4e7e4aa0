"""ParallelVLM (CVPR 2026, arXiv 2603.19610), Tables 1 and 3 to 7: speed ratios, and speed-ups by its renewal.

c = T_p / T_q (6). Speed-ups of Tables 1 and 7 are measured; the theorems model them, and the residuals show how well.
In Table 1, M is the number of tokens per round in Theorem 4 (sequential drafting), and the run length between
rejections in the renewal chain (parallel decoding). Table 7 has its own tau, which does not follow from M.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from espalier.harness.decoding.speculative.speculative_summary import parallel_speedup
from espalier.harness.reports.tables.published_tables import PrintedCell
from lab.analytic.analytic_sheet import PrintedSheet, full_match
from lab.analytic.analytic_verdicts import FormulaClaim, quotient

#: Methods of Table 1 that draft and verify in turn.
IN_TURN = ("Vanilla SD", "SD-Tree", "SpecVLM", "STD")

#: Methods with a draft that sees a tenth of the video.
PRUNED = ("SpecVLM", "STD", "ParallelVLM")

WINDOW = re.compile(r"gamma=(\d+)(?:, .*)?")
LENGTH = re.compile(r"sequence length (\d+)K")

MEASURED = "measured; largest error of the model"


def claims(folder: Path) -> Iterator[FormulaClaim]:
    """Yield the claims of formulas and theorems on the tables."""
    first, third, fourth, fifth, sixth, seventh = (
        PrintedSheet.read(folder, "parallelvlm", number)
        for number in ("1", "3", "4", "5", "6", "7")
    )
    for sheet in (third, fifth):
        for cell in sheet.column("c printed"):
            yield _ratio(sheet, cell)
    yield from _flash(fourth)
    yield from _breakdown(sixth)
    yield from _speedups(first, fifth)
    yield from _extreme(seventh, fifth)


def times(fifth: PrintedSheet, model: str, pruned: bool) -> tuple[float, float]:
    """Return T_p and T_q of a pair in ms; the draft sees the full video, or a tenth if `pruned`."""
    (target,) = fifth.column("T_p", model=model)
    (draft,) = fifth.column("T_q", model=model, budget=f"alpha={0.9 if pruned else 0.0}")
    return target.number, draft.number


def window(cell: PrintedCell) -> int:
    """Return gamma from a budget such as `gamma=9, alpha=0.9`."""
    return int(full_match(cell, WINDOW, "budget")[1])


def _ratio(sheet: PrintedSheet, cell: PrintedCell) -> FormulaClaim:
    (target,) = sheet.column("T_p", model=cell.model)
    draft = sheet.sibling(cell, benchmark="forward time", metric="T_q")
    return FormulaClaim(cell, target.number / draft.number, cell.half, "c", "(6)")


def _flash(sheet: PrintedSheet) -> Iterator[FormulaClaim]:
    """Yield Table 4: without FlashAttention a forward takes 243 ms plus 59 ms for each 8K; and the ratios."""
    for cell in sheet.column("T_p", method="without FlashAttention"):
        value = 243 + 59 * int(full_match(cell, LENGTH, "budget")[1]) / 8
        yield FormulaClaim(cell, value, cell.half, "T_p", "a line", fitted="2 constants")
    for cell in sheet.column("speedup"):
        figure = sheet.sibling(cell, metric="T_p")
        yield quotient(cell, sheet.sibling(figure, method="without FlashAttention"), figure)


def _breakdown(sheet: PrintedSheet) -> Iterator[FormulaClaim]:
    """Yield Table 6: totals, and 512 tokens over the seconds of decoding."""
    parts = ("draft prefill", "target prefill", "draft decode", "target decode")
    for cell in sheet.column("total latency"):
        part_cells = [
            part_cell for part in parts if (part_cell := sheet.sibling(cell, metric=part)).value
        ]
        total = sum(part_cell.number for part_cell in part_cells)
        error = sum(part_cell.half for part_cell in part_cells)
        yield FormulaClaim(
            cell, total, cell.half + error, "total latency", "sum", "rounding of the parts"
        )
    for cell in sheet.column("throughput"):
        part_cells = [
            part_cell for part in parts[2:] if (part_cell := sheet.sibling(cell, metric=part)).value
        ]
        seconds = sum(part_cell.number for part_cell in part_cells)
        error = sum(part_cell.half for part_cell in part_cells)
        allowed = cell.half + 512 / seconds**2 * error
        yield FormulaClaim(
            cell, 512 / seconds, allowed, "throughput", "512 / decoding", "rounding of the parts"
        )


def _speedups(first: PrintedSheet, fifth: PrintedSheet) -> Iterator[FormulaClaim]:
    """Yield Table 1's averages: means of five benchmarks, and the models of methods that have one."""
    for cell in first.column("speedup vs AR", benchmark="Avg"):
        rows = [
            benchmark_cell
            for benchmark_cell in first.column(
                "speedup vs AR", model=cell.model, method=cell.method
            )
            if benchmark_cell.benchmark != "Avg"
        ]
        error = cell.half + rows[0].half
        mean = fmean(benchmark_cell.number for benchmark_cell in rows)
        yield FormulaClaim(
            cell, mean, error, "average", "mean of five", "rounding of all six cells"
        )
        lengths = [
            first.sibling(benchmark_cell, metric="mean accepted length M").number
            for benchmark_cell in rows
        ]
        target, draft = times(fifth, cell.model, cell.method in PRUNED)
        if cell.method == "ParallelVLM":
            value = parallel_speedup(acceptance_of_run(fmean(lengths)), window(cell), target, draft)
            yield _modelled(cell, value, 0.08, "speed-up, renewal", "R T_p / max(gamma T_q, T_p)")
        elif cell.method in IN_TURN:
            value = sequential_of_length(target / draft, window(cell), fmean(lengths))
            yield _modelled(cell, value, 0.07, "speed-up, Theorem 4", "c M / (gamma + c)")


def _extreme(seventh: PrintedSheet, fifth: PrintedSheet) -> Iterator[FormulaClaim]:
    """Yield Table 7: the draft sees less and less of the video."""
    for cell in seventh.column("speedup vs AR"):
        target, draft = times(fifth, cell.model, pruned=True)
        share = seventh.sibling(cell, metric="acceptance rate tau").number
        value = parallel(target / draft, target / draft, share)
        yield _modelled(cell, value, 0.08, "speed-up, Theorem 5", "tau c")
        run = seventh.sibling(cell, metric="mean accepted length M").number
        gamma = round(target / draft)  # (6)
        value = parallel_speedup(acceptance_of_run(run), gamma, target, draft)
        yield _modelled(cell, value, 0.105, "speed-up, renewal", "R T_p / max(gamma T_q, T_p)")


def _modelled(
    cell: PrintedCell, value: float, share: float, column: str, source: str
) -> FormulaClaim:
    why = f"{MEASURED}: {share:.1%}"
    return FormulaClaim(cell, value, share * cell.number, column, source, why, fitted="tolerance")


def acceptance_of_run(mean_run: float) -> float:
    """Return the acceptance for a mean run between refusals of `mean_run`: M / (1 + M)."""
    return mean_run / (1 + mean_run)


def sequential(c: float, gamma: float, share: float) -> float:
    """Return c (tau gamma + 1) / (gamma + c), Theorem 4: in turn, `share` of a window accepted."""
    return c * (share * gamma + 1) / (gamma + c)


def sequential_of_length(c: float, gamma: float, length: float) -> float:
    """Return c M / (gamma + c): Theorem 4 with M = tau gamma + 1, the tokens of a round, as in Table 1."""
    return sequential(c, gamma, (length - 1) / gamma)


def parallel(c: float, gamma: float, share: float) -> float:
    """Return c tau gamma / max(gamma, c), Theorems 1 and 5: at once; tau c at gamma = c."""
    return c * share * gamma / max(gamma, c)
