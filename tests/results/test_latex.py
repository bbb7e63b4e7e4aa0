"""Points of a comparison as the table of a paper."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from espalier import results
from espalier.harness.reports.frame import PointFrame
from espalier.harness.specs.comparable import sweep_names

DEMO = Path(__file__).parents[2] / "results" / "demo"


@pytest.fixture(scope="module")
def points() -> PointFrame:
    return results.compare(DEMO)


def lines_of(text: str) -> list[list[str]]:
    return [line.removesuffix(r" \\").split(" & ") for line in text.splitlines() if " & " in line]


def plain(cell: str) -> float:
    for sign in (r"\textbf{", r"\underline{", "}", r"\ddag{"):
        cell = cell.replace(sign, "")
    return float(cell.split()[0])


def test_every_cell_is_the_score_of_its_point(points: PointFrame) -> None:
    head, *lines = lines_of(points.to_latex())
    assert head == ["Visual tokens kept", r"50\,\%", r"25\,\%", r"10\,\%", r"5\,\%"]
    blocks = [
        block.pivot(index="curve", columns="ratio", values="score")
        for _, block in points[points.curve != "none"].groupby("benchmark", sort=False)
    ]
    for block in blocks:
        for name in block.index:
            line = next(line for line in lines if line[0] == name)
            lines.remove(line)
            assert [plain(cell) for cell in line[1:]] == [
                pytest.approx(100 * score, abs=0.0501) for score in block.loc[name]
            ]
    # What is left is the average: of each method in all benchmarks.
    means = sum(blocks[1:], blocks[0]) / len(blocks)
    assert sorted(line[0] for line in lines) == sorted(means.index)
    for name, *cells in lines:
        assert [plain(cell) for cell in cells] == [
            pytest.approx(100 * score, abs=0.0501) for score in means.loc[name]
        ]


def test_the_best_is_bold_and_the_second_underlined(points: PointFrame) -> None:
    head, *lines = lines_of(points[points.benchmark == "seedling_rec"].to_latex())
    for column in range(1, len(head)):
        cells = [line[column] for line in lines]
        numbers = sorted({plain(cell) for cell in cells}, reverse=True)
        for cell in cells:
            assert (r"\textbf" in cell) == (plain(cell) == numbers[0])
            assert (r"\underline" in cell) == (plain(cell) == numbers[1])


def test_intervals_and_counts_are_options(points: PointFrame) -> None:
    block = points[points.benchmark == "seedling_rec"]
    assert isinstance(block, PointFrame)
    bare, whole = block.to_latex(), block.to_latex(intervals=True, counts=True)
    assert "[" not in bare
    assert "$n = " not in bare
    assert "$n = 100$, unpruned 99.0 {\\scriptsize [94.6, 100.0]}" in whole
    point = block[(block.curve == "divprune") & (block.ratio == 0.9)].iloc[0]
    low, high = 100 * point.score_low, 100 * point.score_high
    assert f"97.0}} {{\\scriptsize [{low:.1f}, {high:.1f}]}}" in whole


def test_hostile_names_are_escaped_and_gaps_are_shown(points: PointFrame, tmp_path: Path) -> None:
    block = points[points.benchmark == "seedling_rec"].copy()
    block.loc[block.curve == "divprune", "curve"] = r"a_b & 50% #1 \x{}~^$"
    block = block[(block.curve != "uniform") | (block.ratio != 0.9)]
    file = tmp_path / "table.tex"
    assert block.to_latex(file, caption="100 % & more", label="tab:x") is None
    text = file.read_text(encoding="utf-8")
    assert r"a\_b \& 50\% \#1 \textbackslash{}x\{\}\textasciitilde{}\textasciicircum{}\$" in text
    assert r"\caption{100 \% \& more}" in text
    assert next(line for line in lines_of(text) if line[0] == "uniform")[3] == "--"


def test_other_frames_are_written_as_pandas_writes_them(points: PointFrame) -> None:
    columns = points[["curve", "score"]]
    assert columns.to_latex() == pd.DataFrame(columns).to_latex()


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no pdflatex")
def test_tables_compile(points: PointFrame, tmp_path: Path) -> None:
    table = points.to_latex(intervals=True, counts=True, caption="All", label="tab:all")
    (tmp_path / "a.tex").write_text(
        r"\documentclass{article}\usepackage{booktabs}\begin{document}"
        f"\n{table}\n\\end{{document}}\n",
        encoding="utf-8",
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "a.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def row(label: str, variant: str = "official", method: str = "fastv", **params: object) -> dict:
    extra = {"label": label, "params": params}
    return {"method": method, "variant": variant, "extra": extra, "settings": {}}


def test_a_sweep_over_a_parameter_names_it_in_every_row() -> None:
    rows = [
        row("K=1 official", K=1, queries="last"),
        row("official", K=2, queries="last"),
        row("K=3 official", K=3, queries="last"),
        row("queries=mean", "paper", K=2, queries="mean"),
        row("layer=2", "paper", "random", layer=2),
        row("", "paper", "random", layer=None),
        row("TokenPruner(K=1)", "paper", "composed", K=5),
        row("", "paper", "composed", K=5),
    ]
    assert sweep_names(rows) == [
        "fastv K=1 official",
        "fastv K=2 official",
        "fastv K=3 official",
        "fastv queries=mean",
        "random layer=2",
        "random",
        "composed TokenPruner(K=1)",
        "composed",
    ]
