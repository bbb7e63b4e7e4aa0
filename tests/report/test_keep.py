"""Rows with a number of tokens in curves, tables and pages: their label, and what they are compared with."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from espalier import results
from espalier.harness.reports.curves.comparison import read_panels
from espalier.harness.reports.curves.curve_figure import draw_curves
from espalier.harness.reports.curves.curve_files import write_curves
from espalier.harness.reports.curves.curve_table import markdown
from espalier.harness.reports.html.page import gather, lines, panels
from tests.report.test_curves import add_run

#: Share of the visual tokens that a number removes of each benchmark's pictures.
REMOVED = {"boxes": {64: 8 / 9, 192: 2 / 3}, "words": {64: 0.95, 192: 0.85}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for benchmark, removed in REMOVED.items():
        add_run(tmp_path, "none", 0.0, 0.9, layer=None, benchmark=benchmark)
        for keep, ratio in removed.items():
            how = {"benchmark": benchmark, "keep": keep}
            add_run(tmp_path, "random", ratio, 0.4 if keep == 64 else 0.7, **how)
            add_run(tmp_path, "clever", ratio, 0.6 if keep == 64 else 0.8, **how)
    return tmp_path


def test_points_are_compared_at_equal_numbers_and_have_them_as_headings(root: Path) -> None:
    boxes, words = read_panels(root, ["boxes", "words"])
    clever = boxes.points[boxes.points.curve == "clever"]
    assert [*clever.keep] == [192, 64]
    assert clever.gain.notna().all()
    assert set(clever.floor) == {"random"}
    assert [*boxes.headings.values()] == [
        "192 tokens (33.33 %)",
        "64 tokens (11.11 %)",
    ]
    page = markdown([boxes, words])
    assert "| method | 192 tokens (33.33 %) | 64 tokens (11.11 %) | FLOPs |" in page
    # Shares differ between the benchmarks, numbers do not.
    mean = page.partition("### Mean retention over 2 benchmarks")[2]
    assert "| method | 192 tokens | 64 tokens |" in mean
    assert mean.count("| clever | 88.9 ") == 1


def labels(figure: Figure) -> list[str]:
    figure.canvas.draw()
    return [label.get_text() for label in figure.axes[0].get_xticklabels()]


def test_the_figure_has_the_numbers_on_its_axis(root: Path) -> None:
    drawn = draw_curves(read_panels(root, ["boxes", "words"]))
    assert (labels(drawn), drawn.axes[0].get_xlabel()) == (["192", "64"], "visual tokens kept")


def test_numbers_beside_ratios_stand_at_their_share(root: Path) -> None:
    add_run(root, "clever", 0.5, 0.85)
    (panel,) = read_panels(root, ["boxes"])
    assert [*panel.headings.values()] == [*("50 %", "192 tokens (33.33 %)", "64 tokens (11.11 %)")]
    figure = draw_curves([panel])
    assert labels(figure) == ["50", "66.67", "88.89"]
    assert "removed (%)" in figure.axes[0].get_xlabel()


def test_tables_have_a_column_of_numbers(root: Path) -> None:
    add_run(root, "clever", 0.5, 0.85)
    rows = results.load(root)
    keep = rows[(rows.benchmark == "boxes") & (rows.method == "clever")].set_index("ratio").keep
    assert keep[2 / 3] == 192
    assert keep.isna()[0.5]
    points = results.compare(root, ["boxes"])
    kept = points[points.curve == "clever"].set_index("ratio").keep
    assert kept[8 / 9] == 64
    assert kept.isna()[0.5]


@pytest.mark.slow
def test_a_number_has_one_column_in_latex_and_in_the_file(root: Path, tmp_path: Path) -> None:
    add_run(root, "clever", 0.5, 0.85)
    table = results.compare(root).to_latex()
    assert r"Visual tokens kept & 50\,\% & 192 tokens & 64 tokens & FLOPs (\%) \\" in table
    average = table.partition("average of 2 benchmarks")[2]
    assert r"clever & -- & 80.0 (88.9) & 60.0 (66.7) & --/32/17 \\" in average
    write_curves(root, tmp_path / "curves", ["boxes", "words"])
    assert sorted(pd.read_csv(tmp_path / "curves.csv").keep.dropna().unique()) == [64, 192]


def test_the_report_page_has_the_numbers(root: Path) -> None:
    gathered = gather([root], "original")
    columns = lines(gathered.rows)["columns"]
    assert sorted(keep for keep in columns["keep"] if keep) == [64] * 4 + [192] * 4
    (boxes, _), means = panels(gathered)
    assert [point["keep"] for point in boxes["curves"][0]["points"]] == [192, 64]
    assert [(mean["curve"], mean["keep"]) for mean in means] == [
        *(("clever", 192), ("clever", 64), ("random", 192), ("random", 64))
    ]
