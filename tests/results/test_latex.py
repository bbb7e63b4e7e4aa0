"""Points of a comparison as the table of a paper."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from espalier import results
from espalier.harness.reports.curves.comparison import read_panels
from espalier.harness.reports.curves.curve_figure import draw_curves
from espalier.harness.reports.curves.curve_table import markdown
from espalier.harness.reports.curves.figures import save
from espalier.harness.reports.curves.point_frame import PointFrame
from espalier.harness.specs.comparable import sweep_names
from espalier.harness.stats import paired_pvalue

DEMO = Path(__file__).parents[2] / "results" / "demo"


@pytest.fixture(scope="module")
def points() -> PointFrame:
    return results.compare(DEMO)


def lines_of(text: str) -> list[list[str]]:
    """Return the cells of each line of a table that prints FLOPs last, without these."""
    lines = [line.removesuffix(r" \\").split(" & ") for line in text.splitlines() if " & " in line]
    assert len({len(line) for line in lines}) == 1
    return [line[:-1] for line in lines]


def plain(cell: str) -> float:
    for sign in (r"\textbf{", r"\underline{", "}", r"\ddag{", "$^{+", "$^{-", "$"):
        cell = cell.replace(sign, "")
    return float(cell.split()[0])


@pytest.mark.slow
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


def scores_of(benchmark: str) -> tuple[list[str], dict[tuple[str, float], np.ndarray]]:
    """Return the methods and the scores of each curve and ratio, by the tables of rows and samples."""
    rows, samples = results.load(DEMO), results.samples(DEMO)
    rows = rows[(rows.benchmark == benchmark) & rows.headline]
    joined = samples.merge(rows, on=["run_key", "metric"]).sort_values(["task", "doc_id"])
    return [name for name in rows.curve.unique() if name.split()[0] not in CONTROLS], {
        point: cells.score.to_numpy() for point, cells in joined.groupby(["curve", "ratio"])
    }


CONTROLS = ("none", "random", "uniform")


@pytest.mark.sampled
@pytest.mark.parametrize("benchmark", ["seedling_rec", "seedling_ocr", "seedling_caption"])
def test_bold_is_told_from_every_other_method(points: PointFrame, benchmark: str) -> None:
    _, *lines = lines_of(points[points.benchmark == benchmark].to_latex())
    by_name = {line[0]: line[1:] for line in lines}
    methods, scores = scores_of(benchmark)
    ratios = sorted({ratio for _, ratio in scores} - {0})
    best = {ratio: max(methods, key=lambda name: scores[name, ratio].mean()) for ratio in ratios}
    others = [(name, ratio) for ratio in ratios for name in methods if name != best[ratio]]
    tests = [paired_pvalue(scores[point], scores[best[point[1]], point[1]]) for point in others]
    order = np.argsort(tests)
    steps = np.array(tests)[order] * np.arange(len(tests), 0, -1)
    corrected = dict(zip((others[at] for at in order), np.maximum.accumulate(steps), strict=True))
    for place, ratio in enumerate(ratios):
        tied = {name for name in methods if corrected.get((name, ratio), 1.0) >= 0.05}
        for name, cells in by_name.items():
            style = cells[place].startswith(r"\textbf"), cells[place].startswith(r"\underline")
            marked = name in tied and tied != set(methods)
            assert style == (marked and len(tied) == 1, marked and len(tied) > 1), (name, ratio)


@pytest.mark.slow
def test_signs_are_the_stars_of_the_markdown_table(points: PointFrame) -> None:
    text = markdown(read_panels(DEMO, ["seedling_rec"], swept=True))
    gains = text.split("Points above random dropping")[1].splitlines()
    cells = (line.strip("|").split("|") for line in gains if line.startswith("| "))
    stars = {name.strip(): ["*" in text for text in texts] for name, *texts in cells}
    block = points[points.benchmark == "seedling_rec"]
    for name, *texts in lines_of(block.to_latex())[1:]:
        curve = block[block.curve == name].set_index("ratio")
        for place, (text, ratio) in enumerate(zip(texts, (0.5, 0.75, 0.9, 0.95), strict=True)):
            sign = "$^{+}$" if curve.gain[ratio] > 0 else "$^{-}$"
            assert (sign in text, "$^" in text) == (stars.get(name, [False] * 4)[place],) * 2
    bare = block.to_latex(marks=False)
    assert "$^{" not in bare
    assert "$^{+}$" in block.to_latex()


def test_controls_stand_below_a_rule_without_marks(points: PointFrame) -> None:
    above, below = points[points.benchmark == "seedling_rec"].to_latex().split(r"\cmidrule{1-6}")
    assert [line[0] for line in lines_of(below)] == ["random", "random layer=2", "uniform"]
    assert r"\textbf" not in below
    assert r"\underline" not in below
    assert "random &" not in above


def test_what_stands_beside_scores(points: PointFrame) -> None:
    block = points[points.benchmark == "seedling_rec"]
    assert isinstance(block, PointFrame)
    table, whole = block.to_latex(), block.to_latex(intervals=True)
    for words in (
        r"\caption{seedling: score by share of visual tokens kept.}",
        r"\label{tab:seedling}",
        r"\textit{seedling\_rec, boxes right",
        "$n = 100$, unpruned 99.0}",
        "Holm's correction",
        "McNemar's exact test",
    ):
        assert words in table
    shares = block[block.curve == "divprune"].flops_share
    assert "/".join(f"{100 * share:.0f}" for share in shares) in table
    bare = block.to_latex(counts=False, costs=False, caption="", label="")
    assert not [word for word in ("$n = ", "FLOPs", "caption", "label", "[") if word in bare]
    assert "$n = 100$, unpruned 99.0 {\\scriptsize [94.6, 100.0]}" in whole
    lines = lines_of(whole)
    for at, ratio in enumerate((0.5, 0.75, 0.9, 0.95), 1):
        point = block[(block.curve == "divprune") & (block.ratio == ratio)].iloc[0]
        ends = f"[{100 * point.score_low:.1f}, {100 * point.score_high:.1f}]"
        below = next(i for i, line in enumerate(lines) if line[0] == "divprune") + 1
        assert ends in lines[below][at]


@pytest.mark.slow
def test_points_are_drawn_as_in_a_report(points: PointFrame, tmp_path: Path) -> None:
    file = tmp_path / "points.svg"
    figure = points.plot(file)
    assert figure._repr_png_().startswith(b"\x89PNG")  # a notebook displays it
    panels = read_panels(DEMO, [], swept=True)
    assert (
        file.read_text() == save(draw_curves(panels), tmp_path / "report", ["svg"])[0].read_text()
    )
    names = [axes.get_title(loc="left") for axes in figure.axes]
    assert names[:3] == [panel.benchmark for panel in panels]
    assert points[["ratio", "score"]].plot(x="ratio", y="score").lines


def test_hostile_names_are_escaped_and_gaps_are_shown(points: PointFrame, tmp_path: Path) -> None:
    block = points[points.benchmark == "seedling_rec"].copy()
    block.loc[block.curve == "divprune", "curve"] = r"a_b & 50% #1 \x{}~^$<|>"
    block = block[(block.curve != "uniform") | (block.ratio != 0.9)]
    file = tmp_path / "table.tex"
    assert block.to_latex(file, caption="100 % & more", label="tab:x") is None
    text = file.read_text(encoding="utf-8")
    escaped = r"a\_b \& 50\% \#1 \textbackslash{}x\{\}\textasciitilde{}\textasciicircum{}\$"
    assert escaped + r"\textless{}\textbar{}\textgreater{}" in text
    assert r"\caption{100 \% \& more}" in text
    assert next(line for line in lines_of(text) if line[0] == "uniform")[3] == "--"


def test_other_frames_are_written_as_pandas_writes_them(points: PointFrame) -> None:
    columns = points[["curve", "score"]]
    assert columns.to_latex() == pd.DataFrame(columns).to_latex()


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no pdflatex")
def test_tables_compile(points: PointFrame, tmp_path: Path) -> None:
    table = points.to_latex(intervals=True) + points.to_latex()
    (tmp_path / "a.tex").write_text(
        r"\documentclass{article}\usepackage{booktabs}\begin{document}"
        f"\n{table}\n\\end{{document}}\n",
        encoding="utf-8",
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "a.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout


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
