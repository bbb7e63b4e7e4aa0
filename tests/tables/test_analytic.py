"""Printed figures against formulas: every cell, and what happens when a cell or the list of misprints is wrong."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from espalier.harness.paths import ROOT
from espalier.harness.reports.tables import rebuild as commands
from espalier.harness.reports.tables.cell_verdicts import formula_values
from espalier.harness.reports.tables.published_tables import FOLDER
from lab.analytic import formulas as analytic
from lab.analytic.analytic_sheet import PrintedSheet
from lab.analytic.analytic_verdicts import (
    BASES,
    JudgedClaim,
    misprints,
    quotient,
)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "papers"))


@pytest.fixture(scope="module")
def judged() -> list[JudgedClaim]:
    return analytic.verdicts()[0]


def change(folder: Path, name: str, old: str, new: str) -> None:
    """Replace what stands exactly once in a file."""
    path = folder / name
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_every_cell_is_reproduced_or_a_known_misprint(capsys) -> None:
    assert analytic.main([]) == 0
    output = capsys.readouterr()
    assert (
        "348 derived, 128 fitted to printed cells, 56 known misprints, 0 off; measured: none"
        in output.out
    )
    assert output.err == ""


#: Cells of each table that the formulas speak of, as printed.
COUNTS = {
    "D2Pruner 4": {"FLOPs": 3, "FLOPs reduction factor": 3, "KV cache": 3},
    "D3ToM 2": {"TFLOPs": 26, "TFLOPs relative": 26, "time relative": 26},
    "D3ToM 5": {"TFLOPs": 11, "TFLOPs relative": 11, "time relative": 11},
    "RTPrune 4": {"GFLOPs": 14, "total tokens": 14, "prefill speedup": 12},
    "RTPrune 7": {"GFLOPs": 26, "overall": 26},
    "AirCache 3": {"throughput": 21, "decoding latency": 21},
    "AirCache 9": {"throughput": 42},
    "AirCache 2": {"MMBench-Video": 18},
    "AirCache 4": {"MMBench-Video": 6},
    "ParallelVLM 3": {"c": 6},
    "ParallelVLM 5": {"c": 15},
    "ParallelVLM 7": {"speed-up, Theorem 5": 4, "speed-up, renewal": 4},
}


def test_no_printed_cell_of_these_columns_is_left_out(judged) -> None:
    counts = Counter(
        (f"{verdict.claim.cell.paper} {verdict.claim.cell.table}", verdict.claim.column)
        for verdict in judged
    )
    wanted = {(table, name): n for table, names in COUNTS.items() for name, n in names.items()}
    assert {key: counts[key] for key in wanted} == wanted


#: Columns whose formulas have constants that were fitted to printed cells, or a tolerance that is the fit's largest
#: error, with the cells of each that are reproduced so.
FITTED = {
    **{("D2Pruner 4", name): 3 for name in ("FLOPs", "FLOPs reduction factor", "KV cache")},
    ("D3ToM 2", "TFLOPs"): 26,
    ("D3ToM 5", "TFLOPs"): 11,
    ("RTPrune 4", "total tokens"): 13,
    # FitPrune, FastV, DART and SparseVLM, of which Large has four, and Large's baseline.
    ("RTPrune 4", "GFLOPs"): 5,
    ("RTPrune 7", "GFLOPs"): 13,
    ("AirCache 3", "decoding latency"): 21,
    ("ParallelVLM 4", "T_p"): 4,
    ("ParallelVLM 1", "speed-up, Theorem 4"): 13,
    ("ParallelVLM 1", "speed-up, renewal"): 5,
    ("ParallelVLM 7", "speed-up, Theorem 5"): 4,
    ("ParallelVLM 7", "speed-up, renewal"): 4,
}


def test_a_reproduced_cell_is_derived_or_fitted(judged) -> None:
    good = [verdict.claim for verdict in judged if verdict.verdict in BASES]
    assert all(
        verdict.verdict == verdict.claim.basis for verdict in judged if verdict.verdict in BASES
    )
    fitted = Counter(
        (f"{claim.cell.paper} {claim.cell.table}", claim.column)
        for claim in good
        if claim.basis == "fitted"
    )
    assert fitted == FITTED
    assert Counter(claim.basis for claim in good) == {"derived": 348, "fitted": 128}
    # A tolerance beyond rounding that is the fit's own largest error proves nothing of a cell.
    for claim in good:
        if "largest error" in claim.why:
            assert "tolerance" in claim.fitted


def test_formulas_beside_cells_say_what_was_fitted() -> None:
    assert formula_values() == analytic.formulas(), "run python -m lab.analytic.formulas --values"
    sources = {formula.source for formula in formula_values().values()}
    assert sources >= {
        "c(2880k+t), fitted: c and t, on 3 cells",
        "a line in B and B n, fitted: 3 constants, tolerance, on 21 cells",
        "(6)",
    }


#: The known slips, by table: those of the papers' cost and speed figures.
SLIPS = {
    "D2Pruner 4": 1,
    "D3ToM 2": 2,
    "D3ToM 5": 5,
    "RTPrune 4": 1,
    "AirCache 3": 1,
    "AirCache 4": 3,
    "AirCache 9": 41,
    "ParallelVLM 5": 1,
    "ParallelVLM 6": 1,
}


def test_misprints_are_those_of_the_list_and_no_more(judged) -> None:
    wrong = [verdict.claim.cell for verdict in judged if verdict.verdict == "misprint"]
    assert Counter(f"{cell.paper} {cell.table}" for cell in wrong) == SLIPS


def residuals(judged: list[JudgedClaim], paper: str, table: str, column: str) -> list[float]:
    verdicts = [verdict.claim for verdict in judged if verdict.claim.column == column]
    cells = [
        verdict
        for verdict in verdicts
        if (verdict.cell.paper, verdict.cell.table) == (paper, table)
    ]
    return [verdict.residual for verdict in cells]


def test_residuals_of_deepseek_ocr_are_those_that_were_found_by_hand(judged) -> None:
    by_hand = [
        *(-0.012, -0.025, 0.026, 0.026, 0.043, 0.043, 0.043),  # Base
        *(-0.136, -0.095, -0.095, 0.039, -0.103, 0.039, 0.039),  # Large
    ]
    assert residuals(judged, "RTPrune", "4", "GFLOPs") == pytest.approx(by_hand, abs=6e-4)
    base = residuals(judged, "RTPrune", "7", "GFLOPs")[1:13]
    wanted = [-0.004, 0.022, 0.049, -0.025, 0.002, 0.028, -0.045, -0.018, 0.008, 0.035, -0.039]
    assert base == pytest.approx([*wanted, -0.012], abs=6e-4)


def test_table_7_of_parallel_decoding(judged) -> None:
    speedups = {
        column: [verdict.claim.value for verdict in judged if verdict.claim.column == column]
        for column in ("speed-up, Theorem 5", "speed-up, renewal")
    }
    # 0.01: the worked figures were rounded on their way.
    assert speedups["speed-up, Theorem 5"] == pytest.approx([3.70, 3.33, 2.97, 2.43], abs=0.01)
    assert speedups["speed-up, renewal"][5:] == pytest.approx([3.50, 3.42, 3.19, 2.79], abs=0.01)


def test_exact_counts_stand_beside_the_papers_own(judged) -> None:
    exact = {
        (verdict.claim.cell.paper, verdict.claim.cell.value): verdict.claim.exact
        for verdict in judged
        if verdict.claim.exact is not None
    }
    # By hand: 32 layers of 2,913 tokens, 4 + 4 MLP and key products of 2 n d^2 or 2 n d m, causal pairs twice 2 d.
    n, d, m = 2913, 4096, 11008
    layer = 2 * n * (4 * d * d + 3 * d * m) + 4 * d * n * (n + 1) / 2
    assert exact["D2Pruner", "16.9"] == pytest.approx(32 * layer / 1e12)
    assert exact["D2Pruner", "1512"] == pytest.approx(n * 524288 / 1e6)
    # LLaDA has no grouped keys, a gated MLP and sees every pair: twice the paper's multiply-adds.
    assert exact["D3ToM", "262.60"] == pytest.approx(2 * 262.599, abs=0.01)
    # Two FLOPs a multiply-add, as RTPrune counts; masked pairs are spared, 11 routers of 64 experts are not.
    spared, routers = 12 * 4 * 1280 * 283 * 282 / 2, 11 * 2 * 283 * 1280 * 64
    assert exact["RTPrune", "235.7"] == pytest.approx((235.6878336e9 - spared + routers) / 1e9)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "old", "new", "cell"),
    [
        ("d2pruner_table4.csv", ",FLOPs,6.0,T", ",FLOPs,6.1,T", "33.4% visual tokens"),
        ("d2pruner_table4.csv", ",KV cache,198,", ",KV cache,199,", "11.2% visual tokens"),
        ("d3tom_table2.csv", ",TFLOPs,187.18,", ",TFLOPs,187.19,", "PDrop, 50% tokens"),
        ("d3tom_table5.csv", ",TFLOPs,151.98,", ",TFLOPs,151.99,", "merge layer index 11"),
        ("rtprune_table7.csv", ",GFLOPs,305.0,", ",GFLOPs,305.1,", "at layer 3, 300 tokens"),
        ("aircache_table3.csv", ",throughput,500,", ",throughput,501,", "batch 8, prompt 2k"),
        ("parallelvlm_table7.csv", ",speedup vs AR,2.90,", ",speedup vs AR,2.80,", "alpha=0.99"),
    ],
)
def test_a_changed_digit_is_found_and_named(published, capsys, name, old, new, cell) -> None:
    change(published, name, old, new)
    assert analytic.main(["--published", str(published)]) == 1
    error = capsys.readouterr().err
    assert cell in error
    assert all(line.startswith("off: ") for line in error.splitlines())


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("aircache_table9.csv", ",throughput,214,", ",throughput,215,", "it is listed with 214"),
        ("aircache_table9.csv", ",throughput,214,", ",throughput,281,", "no claim confirms it"),
        ("misprints.csv", ",214,281,", ",214,291,", "misprints.csv has 291 instead"),
    ],
)
def test_a_misprint_counts_as_it_is_printed_and_listed(
    published, capsys, name, old, new, message
) -> None:
    change(published, name, old, new)
    assert analytic.main(["--published", str(published)]) == 1
    assert message in capsys.readouterr().err


def test_an_unknown_command_is_refused(capsys) -> None:
    assert commands.main(["analytical"]) == 2
    assert "misprints" in capsys.readouterr().err


def test_each_cell_has_a_line(capsys, judged) -> None:
    assert analytic.main(["--cells"]) == 0
    head, *lines, _ = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "cell"
    assert len(lines) == len(judged)
    for line, verdict in zip(lines, judged, strict=True):
        assert line.startswith(verdict.claim.cell.name)
        assert f"{verdict.claim.value:.6g}" in line
        assert verdict.claim.fitted in line


def test_quotients_are_allowed_what_rounding_takes() -> None:
    sheet = PrintedSheet.read(FOLDER, "d2pruner", "4")
    for cell in sheet.column("prefill time reduction factor"):
        reduced = sheet.sibling(cell, metric="prefill time")
        plain = sheet.sibling(reduced, method="Vanilla", budget="100% visual tokens")
        claim = quotient(cell, plain, reduced)
        ends = [
            (plain.number + a * 0.5) / (reduced.number + b * 0.5) for a in (-1, 1) for b in (-1, 1)
        ]
        spread = max(abs(end - claim.value) for end in ends)
        assert claim.tolerance == pytest.approx(cell.half + spread, rel=0.02)


def test_every_misprint_says_why_and_where() -> None:
    with (FOLDER / "misprints.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert all(line["why"] and line["source"].startswith("arXiv ") for line in lines)
    assert len({misprint.key for misprint in misprints(FOLDER / "misprints.csv")}) == len(lines)


@pytest.mark.slow
def test_no_model_library_is_loaded() -> None:
    code = (
        "import sys; from lab.analytic import formulas; "
        "formulas.main([]); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
