"""ParallelVLM (CVPR 2026, arXiv 2603.19610), Tables 1 and 3 to 7: speed ratios, and speed-ups by its theorems.

c = T_p / T_q (6). Speed-ups of Tables 1 and 7 are measured, and a theorem is a model of them: its residuals say how
good a one. In Table 1 the tokens of a round (M) give drafting in turn by Theorem 4; the runs between refusals (M as
well) give parallel decoding by the renewal chain. Table 7 has a tau of its own, which M does not give.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from espalier.harness.decoding.speculative import theorems
from espalier.harness.decoding.speculative.renewal import acceptance_of_run, parallel_speedup
from espalier.harness.reports.tables.analytic.analytic_sheet import Sheet, fits
from espalier.harness.reports.tables.analytic.analytic_verdicts import Claim, quotient
from espalier.harness.reports.tables.printed_cell import Cell

#: Methods of Table 1 that draft, then verify.
IN_TURN = ("Vanilla SD", "SD-Tree", "SpecVLM", "STD")

#: Methods whose draft sees a tenth of the video.
PRUNED = ("SpecVLM", "STD", "ParallelVLM")

WINDOW = re.compile(r"gamma=(\d+)(?:, .*)?")
LENGTH = re.compile(r"sequence length (\d+)K")

MEASURED = "measured; largest error of the model"


def claims(folder: Path) -> Iterator[Claim]:
    """Yield what formulas and theorems say of the tables."""
    first, third, fourth, fifth, sixth, seventh = (
        Sheet.read(folder, "parallelvlm", number) for number in ("1", "3", "4", "5", "6", "7")
    )
    for sheet in (third, fifth):
        for cell in sheet.column("c printed"):
            yield _ratio(sheet, cell)
    yield from _flash(fourth)
    yield from _breakdown(sixth)
    yield from _speedups(first, fifth)
    yield from _extreme(seventh, fifth)


def times(fifth: Sheet, model: str, pruned: bool) -> tuple[float, float]:
    """Return T_p and T_q of a pair in ms, its draft with all of the video or a tenth."""
    (target,) = fifth.column("T_p", model=model)
    (draft,) = fifth.column("T_q", model=model, budget=f"alpha={0.9 if pruned else 0.0}")
    return target.number, draft.number


def window(cell: Cell) -> int:
    """Return gamma out of a budget such as `gamma=9, alpha=0.9`."""
    return int(fits(cell, WINDOW, "budget")[1])


def _ratio(sheet: Sheet, cell: Cell) -> Claim:
    (target,) = sheet.column("T_p", model=cell.model)
    draft = sheet.beside(cell, benchmark="forward time", metric="T_q")
    return Claim(cell, target.number / draft.number, cell.half, "c", "(6)")


def _flash(sheet: Sheet) -> Iterator[Claim]:
    """Yield Table 4: without FlashAttention a forward takes 243 ms and 59 more for each 8K, and the ratios."""
    for cell in sheet.column("T_p", method="without FlashAttention"):
        thousands = int(fits(cell, LENGTH, "budget")[1])
        value = 243 + 59 * thousands / 8
        yield Claim(cell, value, cell.half, "T_p", "a line", fitted="2 constants")
    for cell in sheet.column("speedup"):
        own = sheet.beside(cell, metric="T_p")
        yield quotient(cell, sheet.beside(own, method="without FlashAttention"), own)


def _breakdown(sheet: Sheet) -> Iterator[Claim]:
    """Yield Table 6: totals, and 512 tokens over the seconds of decoding."""
    parts = ("draft prefill", "target prefill", "draft decode", "target decode")
    for cell in sheet.column("total latency"):
        spent = [one for part in parts if (one := sheet.beside(cell, metric=part)).value]
        total, lost = sum(one.number for one in spent), sum(one.half for one in spent)
        yield Claim(cell, total, cell.half + lost, "total latency", "sum", "rounding of the parts")
    for cell in sheet.column("throughput"):
        spent = [one for part in parts[2:] if (one := sheet.beside(cell, metric=part)).value]
        seconds, lost = sum(one.number for one in spent), sum(one.half for one in spent)
        allowed = cell.half + 512 / seconds**2 * lost
        yield Claim(
            cell, 512 / seconds, allowed, "throughput", "512 / decoding", "rounding of the parts"
        )


def _speedups(first: Sheet, fifth: Sheet) -> Iterator[Claim]:
    """Yield Table 1's averages: means of five benchmarks, and the models of the methods that have one."""
    for cell in first.column("speedup vs AR", benchmark="Avg"):
        rows = [
            one
            for one in first.column("speedup vs AR", model=cell.model, method=cell.method)
            if one.benchmark != "Avg"
        ]
        lost = cell.half + rows[0].half
        mean = fmean(one.number for one in rows)
        yield Claim(cell, mean, lost, "average", "mean of five", "rounding of all six cells")
        lengths = [first.beside(one, metric="mean accepted length M").number for one in rows]
        target, draft = times(fifth, cell.model, cell.method in PRUNED)
        if cell.method == "ParallelVLM":
            run = acceptance_of_run(fmean(lengths))
            value = parallel_speedup(run, window(cell), target, draft)
            yield _modelled(cell, value, 0.08, "speed-up, renewal", "R T_p / max(gamma T_q, T_p)")
        elif cell.method in IN_TURN:
            value = theorems.sequential_of_length(target / draft, window(cell), fmean(lengths))
            yield _modelled(cell, value, 0.07, "speed-up, Theorem 4", "c M / (gamma + c)")


def _extreme(seventh: Sheet, fifth: Sheet) -> Iterator[Claim]:
    """Yield Table 7: the draft sees less and less of the video."""
    for cell in seventh.column("speedup vs AR"):
        target, draft = times(fifth, cell.model, pruned=True)
        share = seventh.beside(cell, metric="acceptance rate tau").number
        value = theorems.parallel(target / draft, target / draft, share)
        yield _modelled(cell, value, 0.08, "speed-up, Theorem 5", "tau c")
        run = seventh.beside(cell, metric="mean accepted length M").number
        gamma = round(target / draft)  # (6)
        value = parallel_speedup(acceptance_of_run(run), gamma, target, draft)
        yield _modelled(cell, value, 0.105, "speed-up, renewal", "R T_p / max(gamma T_q, T_p)")


def _modelled(cell: Cell, value: float, share: float, column: str, source: str) -> Claim:
    why = f"{MEASURED}: {share:.1%}"
    return Claim(cell, value, share * cell.number, column, source, why, fitted="tolerance")
