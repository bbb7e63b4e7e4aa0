"""Pictures of scores: what their rows and marks say, and where their numbers come from."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from espalier import results
from espalier.harness.errors import UserError
from espalier.harness.paths import DEMO, ROOT
from lab.pages.picture_grid import Estimate, GridPanel, Mark, PictureGrid, draw_grid
from lab.pages.picture_tables import demo_gains, gains, page_tables, scores, tables_with
from lab.pages.pictures import NAMES, PICTURES, main, merging

PAGE = """# Curves

### seedling_vqa: accuracy, 40 samples

Score in percent with its 95 % interval.

| method | 50 % | 10 % | FLOPs |
| --- | ---: | ---: | ---: |
| unpruned | 90.0 [80.0, 95.0] |  | 100 % |
| mine | 80.0 [70.0, 85.0] | 60.0 [50.0, 70.0] | 50 % |
| random | 70.0 [60.0, 75.0] | 50.0 [40.0, 60.0] | 50 % |

Points above random dropping.

| method | 50 % | 10 % |
| --- | ---: | ---: |
| mine | +10.0 [+4.0, +15.0], p = 0.001 | -9.0 [-20.0, +1.0], p = 0.040 |
| other | 42.0, -30.0 [-40.0, -20.0] **below*** | 77.7, +1.0 [-2.0, +3.0] |
"""


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_the_tables_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    first, second = page_tables(page)
    assert first.heading == "seedling_vqa: accuracy, 40 samples"
    assert second.text == "Points above random dropping."
    assert [table.lines for table in tables_with(page, "Score in percent")] == [first.lines]
    with pytest.raises(UserError, match=r"page\.md: no table of 'nothing'"):
        tables_with(page, "nothing")
    read = scores(first, first.columns, ("random",))
    assert read["mine", "10 %"] == [Estimate(60.0, (50.0, 70.0), Mark.METHOD)]
    assert read["random", "50 %"][0].mark is Mark.OPEN
    assert len(read) == 4


def test_a_star_or_the_corrected_p_value_marks_a_difference(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    (table,) = tables_with(page, "Points above")
    starred = gains(table, table.columns)
    assert starred["other", "50 %"] == [Estimate(-30.0, (-40.0, -20.0), Mark.WORSE)]
    assert starred["other", "10 %"][0].mark is Mark.OPEN
    page.write_text("\n".join(line for line in PAGE.splitlines() if "other" not in line))
    (table,) = tables_with(page, "Points above")
    printed = gains(table, table.columns)
    assert printed["mine", "50 %"][0].mark is Mark.BETTER
    # 0.04 of two tests, the other at 0.001: Holm leaves it at 0.04.
    assert printed["mine", "10 %"][0].mark is Mark.WORSE


@pytest.mark.slow
def test_the_demo_rows_are_marked_as_compare_tests_them() -> None:
    points = results.compare(DEMO, ["seedling_rec"])
    rows = demo_gains(points, NAMES)
    tenth = points[(points.curve == "divprune") & (points.ratio == 0.9)].iloc[0]
    (estimate,) = rows["DivPrune", "10 %"]
    assert estimate.value == pytest.approx(100 * tenth.gain)
    assert estimate.mark is (Mark.BETTER if tenth.gain_p_holm < 0.05 else Mark.OPEN)
    assert list(dict.fromkeys(name for name, _ in rows))[:2] == ["D²Pruner", "DivPrune"]


def test_a_grid_names_each_method_once_and_draws_each_interval() -> None:
    rows = {
        ("a", "50 %"): [Estimate(1.0, (-1.0, 3.0), Mark.OPEN)],
        ("a", "10 %"): [Estimate(5.0, (3.0, 7.0), Mark.BETTER)],
        ("b", "50 %"): [Estimate(-5.0, None, Mark.WORSE)],
    }
    panels = [GridPanel("one", rows), GridPanel("two", {("c", "5 %"): rows["a", "10 %"]}, 2.0)]
    figure = draw_grid(
        PictureGrid("title", "points", panels, {Mark.OPEN: "none"}, "whole", zero=True)
    )
    assert texts(figure) == ["a", "b", "c"]
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == [
        *("50 %", "10 %", "50 %", "5 %")
    ]
    drawn = [tuple(line.get_xdata()) for line in figure.axes[0].lines]
    assert (-1.0, 3.0) in drawn
    assert (3.0, 7.0) in drawn
    assert len(drawn) == 1 + 2 + 3  # zero, two intervals, three marks


def test_merging_has_a_row_for_each_number_of_steps_and_share() -> None:
    labels = [label.get_text() for label in merging().axes[0].get_yticklabels()]
    shares = ["100 %", "50 %", "25 %", "10 %"]
    assert labels == [label for steps in (16, 8, 4) for label in (f"{steps} steps", *shares)]


@pytest.mark.slow
def test_pictures_are_in_the_repository_and_readable_at_700_pixels(tmp_path: Path) -> None:
    for path, (_, suffixes) in PICTURES.items():
        for suffix in suffixes:
            assert (ROOT / f"{path}.{suffix}").is_file()
        widths = (840,) if path == "docs/figures/pruned" else (1400, 1440)
        assert Image.open(ROOT / f"{path}.png").width in widths
    assert main(["kv/curves", "--out", str(tmp_path)]) == 0
    written = "lab/measured/kv/curves.png"
    assert Image.open(tmp_path / written).size == Image.open(ROOT / written).size
