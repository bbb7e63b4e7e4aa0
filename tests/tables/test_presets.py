"""Presets of published tables: current, exact, composable, and the whole path on the embedded model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rc_context
from matplotlib.text import Text

import run
from espalier.harness.config.grids import grids_of
from espalier.harness.config.group_table import listing
from espalier.harness.paths import ROOT
from espalier.harness.reports.curves.figures import STYLE
from espalier.harness.reports.tables import table_picture as picture
from espalier.harness.reports.tables.cell_runs import LISTED, preset, runs_of, titles
from espalier.harness.reports.tables.published_tables import read_paper
from espalier.harness.reports.tables.rebuild import rebuild, requested_tables, write
from tests import commands

NAMES = sorted(titles())


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_holds_the_runs_of_its_table(name: str) -> None:
    slug, _, number = name.rpartition("_")
    wanted = [_plain(run) for run in runs_of(read_paper(slug), number.removeprefix("table"))]
    cells = [cell for grid in preset(name)["grids"] for cell in _cells(grid)]
    assert sorted(map(sorted, cells)) == sorted(map(sorted, wanted))


def _cells(grid: Mapping[str, Any]) -> list[list[str]]:
    values = [str(v).split(",") if k in LISTED else [str(v)] for k, v in grid.items()]
    return [_line(zip(grid, cell, strict=True)) for cell in product(*values)]


def _plain(run: Mapping[str, Any]) -> list[str]:
    return _line(run.items())


def _line(pairs: Any) -> list[str]:
    return [f"{key}={value}" for key, value in pairs]


@pytest.mark.sampled(48)
@pytest.mark.parametrize("name", NAMES)
def test_one_cell_of_every_grid_is_a_valid_run(name: str) -> None:
    grids = preset(name)["grids"]
    seen = set()
    for grid in grids[:: max(1, len(grids) // 2)]:
        first = [f"{key}={str(value).split(',')[0]}" for key, value in grid.items()]
        if tuple(first) not in seen:
            seen.add(tuple(first))
            commands.spec_of(*([pair.replace("=True", "=true") for pair in first]))


def test_hydra_launches_every_grid_of_every_preset() -> None:
    """Hydra composes what is not swept before it takes one of several methods, and knows none of their settings."""
    for name in NAMES:
        grids = preset(name)["grids"]
        cells = [cell for grid in grids for cell in _cells(grid)]
        lines = grids_of(grids, []) or []
        launched = [
            cell for line in lines for cell in _cells(dict(pair.split("=", 1) for pair in line))
        ]
        as_written = [
            [pair.replace("=True", "=true").replace("=False", "=false") for pair in cell]
            for cell in cells
        ]
        assert sorted(map(sorted, launched)) == sorted(map(sorted, as_written)), name
        for line in lines:
            overrides = dict(pair.split("=", 1) for pair in line)
            assert "," not in overrides["method"] or not any(
                key.startswith("method.") for key in overrides
            ), line


def test_the_command_line_picks_out_of_the_grids() -> None:
    chosen = ["method=sparsevlm,dart", "benchmark=pope", "ratio=0.88888889"]
    cells = commands.cells_of("-m", "+experiment=d2pruner_table1", *chosen)
    cells = {
        (
            *(cell[key]["name"] for key in ("model", "method")),
            cell["budget"]["rule"],
            cell["benchmark"]["name"],
            cell["ratio"],
        )
        for cell in cells
    }
    assert cells == {
        (model, method, rule, "pope", 0.88888889)
        for model in ("llava15_7b", "llava_next_7b")
        for method, rule in (("sparsevlm", "average"), ("dart", "kept"))
    }


def test_hydra_finds_a_preset_by_its_name_and_nothing_is_imported_for_others() -> None:
    assert (len(NAMES), len([name for name in NAMES if "_fig" in name])) == (45, 8)
    script = (
        "import sys; from espalier.harness.config.compose import read_command; read_command(['ratio=0.5']); "
        "assert not [name for name in sys.modules if name.startswith('espalier.harness.reports')]"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_presets_are_listed_with_their_titles() -> None:
    lines = listing("experiment").splitlines()
    assert "d2pruner_table1       D2Pruner (arXiv 2512.19443), Table 1: " in "\n".join(lines)
    assert {*NAMES, "quickstart"} < {line.split()[0] for line in lines}


@pytest.mark.slow
def test_from_sweep_to_table(tmp_path: Path) -> None:
    chosen = ["method=none,fastv", "ratio=0,0.66666667", "benchmark=seedling_exist", "limit=2"]
    line = ["-m", "+experiment=d2pruner_table1", "model=seedling", *chosen, f"store={tmp_path}"]
    assert run.main([*line, "engine.warmup=0"]) == 0
    (table,), notes = rebuild([("d2pruner", "1")], [tmp_path], model="seedling")
    measured = {
        (filled.cell.method, filled.cell.budget, filled.cell.benchmark): filled.row.samples
        for filled in table.filled
        if filled.row is not None
    }
    assert notes == []
    # What stands for POPE stands for MME, too.
    assert measured == {
        (method, budget, benchmark): 2
        for method, budget in (
            *(("Vanilla", "576 visual tokens"), ("Vanilla", "2880 visual tokens")),
            ("FastV", "192 visual tokens"),
        )
        for benchmark in ("MME", "POPE")
    }
    assert all(filled.difference is None for filled in table.filled)
    paths = write(table, tmp_path / "out")
    assert [path.suffix for path in paths] == [".md", ".tex", ".csv", ".html"]
    assert "seedling in place" not in paths[0].read_text()
    assert "not to be compared with theirs" in " ".join(paths[0].read_text().split())


@pytest.mark.slow
def test_the_words_of_a_figure_stay_on_it() -> None:
    """Titles and notes are wrapped: a figure of one panel is narrower than most of them."""
    tables, _ = rebuild(requested_tables("all", []), [])
    figures = [table for table in tables if table.entry.panels]
    assert min(len(table.entry.panels) for table in figures) == 1
    for table in figures:
        with rc_context(STYLE):
            drawn = picture.draw(table)
            # The canvas of a figure that is not shown draws nothing, and lays nothing out.
            drawn.draw_without_rendering()
        assert "nothing measured yet" in [text.get_text() for text in drawn.findobj(Text)]
        for text in drawn.findobj(Text):
            if text.get_text() and text.get_visible():
                box = text.get_window_extent()
                assert box.x0 >= -1, (table.name, text)
                assert box.x1 <= drawn.bbox.x1 + 1, (table.name, text)


@pytest.mark.slow
def test_from_sweep_to_picture(tmp_path: Path) -> None:
    line = [
        "method=none,fastv,d2pruner_di",
        "ratio=0,0.25,0.5",
        "benchmark=seedling_rec",
        "limit=2",
    ]
    line = ["-m", "+experiment=d2pruner_fig4", "model=seedling", *line, f"store={tmp_path}"]
    assert run.main([*line, "engine.warmup=0"]) == 0
    (figure,), notes = rebuild([("d2pruner", "fig4")], [tmp_path], model="seedling")
    assert notes == []
    understanding, localization, _ = (
        picture.points(figure, panel) for panel in figure.entry.panels
    )
    assert understanding == {}
    assert {name: list(values) for name, values in localization.items()} == {
        name: ["75% tokens", "50% tokens"] for name in ("FastV", "D2Pruner (DI)")
    }
    # All eight splits stand on one benchmark here.
    assert {count for values in localization.values() for _, count in values.values()} == {8}
    paths = write(figure, tmp_path / "out")
    endings = ("svg", "png", "md", "tex", "csv", "html")
    assert [path.name for path in paths] == [f"d2pruner_fig4.{ending}" for ending in endings]
    drawn = paths[0].read_text()
    assert "D2Pruner (DI)" in drawn
    assert "nothing measured yet" in drawn
    assert paths[1].stat().st_size > 10_000
