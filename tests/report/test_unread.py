"""Scores of rows where more than 5 % of the answers could not be read are marked wherever they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from espalier.harness.reports.curves.curve_files import write_curves
from espalier.harness.reports.html.page import assemble
from espalier.harness.store.row_text import FOOTNOTE, MARK, MEANS, is_marked, too_many
from espalier.harness.store.run_entries import entries, table_cells
from tests.pages.test_report import content
from tests.report.test_curves import N, add_run, report_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    extra = {"headline": "acc", "label": "", "sites": [{"where": "layer", "layer": 0}]}
    add_run(tmp_path, "none", 0.0, 0.9, layer=None)
    add_run(tmp_path, "random", 0.5, 0.8, extra=extra | {"unparsed": N // 20})
    add_run(tmp_path, "clever", 0.5, 0.7, extra=extra | {"unparsed": N // 20 + 1})
    return tmp_path


@pytest.mark.parametrize(
    ("unparsed", "samples", "marked"),
    [(None, 20, None), (0, 20, False), (1, 20, False), (2, 20, True), (5, 100, False)],
)
def test_above_a_twentieth(unparsed: int | None, samples: int, marked: bool | None) -> None:
    assert too_many(unparsed, samples) is marked
    assert is_marked({"n_samples": samples, "extra": {"unparsed": unparsed}}) is bool(marked)


@pytest.mark.slow
def test_curves_mark_such_points_and_say_what_it_means(root: Path, tmp_path: Path) -> None:
    _, svg, table, latex, _ = write_curves(root, tmp_path / "curves")
    lines = [
        text_line
        for text_line in table.read_text().splitlines()
        if text_line.startswith("| clever")
    ]
    assert len(lines) == 3  # score, retention, against random
    assert all(MARK in text_line for text_line in lines)
    assert not any(
        MARK in text_line for text_line in table.read_text().splitlines() if "| random" in text_line
    )
    assert f"{FOOTNOTE}." in table.read_text()
    assert MEANS in svg.read_text()
    assert re.search(r"70\.0(\$\^\{[+-]\}\$)?\\ddag\{\}", latex.read_text())
    assert r"\ddag{} more than" in latex.read_text()


def test_without_such_points_nothing_is_said_of_them(root: Path, tmp_path: Path) -> None:
    keys = [f"boxes-{name}-{N}" for name in ("none--0.0", "random--0.5")]
    run_keys = [entry.key for entry in entries(root) if entry.key.startswith(tuple(keys))]
    _, svg, table, latex, _ = write_curves(root, tmp_path / "curves", run_keys=run_keys)
    assert MARK not in table.read_text() + svg.read_text()
    assert MEANS not in svg.read_text()
    assert r"\ddag" not in latex.read_text()


def test_the_page_of_a_sweep_marks_them(root: Path, tmp_path: Path) -> None:
    text = report_of(root, tmp_path / "report")["boxes.md"]
    assert f"70.0{MARK}, " in text
    assert f"{FOOTNOTE}." in text


def test_the_report_marks_them(root: Path) -> None:
    page = content(root)
    columns = page["rows"]["columns"]  # type: ignore[index]
    assert sorted(columns["unread"]) == [0, 0, 1]
    (panel,) = page["panels"]  # type: ignore[misc]
    unread = {curve["name"]: curve["points"][0]["unread"] for curve in panel["curves"]}
    assert unread == {"random": 0, "clever": 1}
    assert FOOTNOTE in str(page["notes"])
    assert "could not be read" in assemble(page)


def test_a_list_of_runs_says_so(root: Path) -> None:
    notes = {table_cells(entry)[3]: table_cells(entry)[-1] for entry in entries(root)}
    assert notes == {"none": "", "random": "", "clever": MEANS}
