"""Files of a selection beside the report page, and gains of clocked runs."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest

from espalier.harness.cli.report import main
from espalier.harness.reports.curves.curve_files import read_selection, write_selection
from espalier.harness.runs import console
from espalier.harness.runs.wandb_content import history
from tests.report.test_curves import add_run
from tests.runs.test_console import row


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = tmp_path / "store"
    for benchmark in ("boxes", "words"):
        add_run(store, "none", 0.0, 0.9, layer=None, benchmark=benchmark)
        for ratio, mean in ((0.5, 0.8), (0.9, 0.5)):
            add_run(store, "random", ratio, mean, benchmark=benchmark)
            add_run(store, "clever", ratio, mean + 0.1, benchmark=benchmark)
            add_run(store, "other", ratio, mean + 0.05, benchmark=benchmark)
    return store


@pytest.mark.slow
def test_filters_keep_what_methods_are_compared_with(root: Path, tmp_path: Path) -> None:
    filters = ["benchmark=boxes", "method=clever", "ratio=0.9", "engine.positions=original"]
    paths, notes = write_selection(read_selection([root], filters), tmp_path / "page")
    assert [path.suffix for path in paths] == [".png", ".svg", ".md", ".tex", ".csv"]
    points = pd.read_csv(paths[-1])
    assert {*points.benchmark} == {"boxes"}
    assert {*zip(points.curve, points.ratio, strict=True)} == {
        *(("none", 0.0), ("random", 0.9), ("clever", 0.9))
    }
    assert points.set_index("curve").gain["clever"] == pytest.approx(0.1)
    assert notes == {"tiny on boxes": ()}
    assert re.search(
        r"^clever & 60\.0(\$\^\{\+\}\$)? & \d+ \\\\$", paths[3].read_text(), re.MULTILINE
    )


@pytest.mark.slow
def test_several_models_have_files_each(root: Path, tmp_path: Path) -> None:
    add_run(root, "none", 0.0, 0.9, layer=None, model="huge")
    paths, _ = write_selection(read_selection([root], []), tmp_path / "page")
    assert {path.stem for path in paths} == {"page-huge-kept", "page-tiny-kept"}


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("methods=clever", "filter='methods' is unknown (did you mean method?)"),
        ("method=clevr", "method='clevr' is unknown (did you mean clever?)"),
        ("ratio=0.7", "ratio='0.7' is unknown"),
    ],
)
def test_a_filter_that_matches_nothing_is_one_line(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, line: str
) -> None:
    assert main([str(root), word, "--out", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_the_gain_of_a_clocked_run_is_first() -> None:
    gain = {
        "prefill": {"ratio": 1.85, "low": 1.8, "high": 1.91},
        "step": {"ratio": 1.1, "low": None, "high": None},
    }
    clocked = row("fastv", "latency", extra={"latency": {"gain": gain}})
    out = StringIO()
    console.print_rows([clocked], out, full=True)
    first = next(line for line in out.getvalue().splitlines()[1:] if line.strip())
    assert first.split(maxsplit=1)[0] == "gain"
    assert "prefill 1.85x [1.80, 1.91], step 1.10x over the unreduced model" in first
    out = StringIO()
    console.print_rows([clocked, row("none", "latency")], out, full=False)
    heads = next(line for line in out.getvalue().splitlines() if "prefill gain" in line)
    assert heads.index("prefill gain") < heads.index("metric")
    assert next(iter(history(clocked, [], 0))) == "gain/prefill"
