"""Curves from a store of made-up runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.curves import write_curves
from harness.curves.__main__ import main
from harness.curves.data import read_panels
from harness.curves.figure import spread
from harness.errors import UserError
from harness.evaluation.samples import score_entries
from harness.store import Store

N = 200


def add_run(
    root: Path,
    method: str,
    ratio: float,
    mean: float,
    label: str = "",
    layer: int | None = 0,
    benchmark: str = "boxes",
    n: int = N,
    **changes: object,
) -> None:
    """Write a run whose scores share each sample's difficulty with all other runs."""
    difficulty = np.random.default_rng(0).permutation(n) / n
    name = "-".join(map(str, (benchmark, method, label, ratio, n, *changes.values())))
    directory = Store(root).run(name.replace(" ", "_"))
    scores = {(benchmark, i): {"acc": float(d < mean)} for i, d in enumerate(difficulty)}
    directory.journal.append(*score_entries(scores))
    sites = [] if layer is None else [{"where": "layer", "layer": layer}]
    row = {
        "schema": 1,
        "run_key": name,
        "model": "tiny",
        "method": method,
        "benchmark": benchmark,
        "ratio": ratio,
        "budget_rule": "kept",
        "seed": 0,
        "n_samples": n,
        "metrics": {"acc": {"value": mean, "stderr": None}},
        "extra": {"headline": "acc", "label": label, "sites": sites},
    }
    directory.commit(row | changes)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    add_run(tmp_path, "none", 0.0, 0.9, layer=None)
    for ratio, random, good in ((0.0, 0.9, 0.9), (0.5, 0.8, 0.9), (0.9, 0.45, 0.81)):
        add_run(tmp_path, "random", ratio, random)
        add_run(tmp_path, "random", ratio, random + 0.01, label="layer=2", layer=2)
        add_run(tmp_path, "clever", ratio, good)
        add_run(tmp_path, "clever", ratio, good - 0.02, label="layer=2", layer=2)
    return tmp_path


def test_points_are_means_with_paired_retention_and_gain(root: Path) -> None:
    (panel,) = read_panels(root, ["boxes"])
    assert (panel.metric, panel.n_samples, panel.ratios) == ("acc", N, (0.0, 0.5, 0.9))
    assert panel.full is not None
    assert panel.full.value == pytest.approx(0.9)
    assert panel.full.low < 0.9 < panel.full.high
    # Methods first, controls last.
    names = [curve.name for curve in panel.curves]
    assert names == ["clever", "clever layer=2", "random", "random layer=2"]
    clever, late, random, _ = panel.curves
    assert (clever.floor, late.floor, random.floor) == ("random", "random layer=2", None)
    end = clever.points[-1]
    assert end.score.value == pytest.approx(0.81)
    assert end.retention is not None
    assert end.gain is not None
    assert end.retention.value == pytest.approx(0.9)
    assert end.gain.value == pytest.approx(0.36)
    assert end.gain.low > 0.29
    assert end.pvalue is not None
    assert end.pvalue < 0.001
    # Nothing is chosen at ratio 0.
    assert clever.points[0].gain is None
    assert clever.points[0].retention is not None
    assert clever.points[0].retention.value == 1.0


def test_files_and_table(root: Path, tmp_path: Path) -> None:
    png, svg, table = write_curves(root, tmp_path / "new" / "curves")
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "clever layer=2" in svg.read_text()
    text = table.read_text()
    assert "| method | 100 % | 50 % | 10 % |" in text
    assert "| unpruned | 90.0 [85.0, 93.8] |" in text
    assert "+36.0 [" in text
    first = svg.read_bytes()
    write_curves(root, tmp_path / "new" / "curves")
    assert svg.read_bytes() == first


def test_seeds_are_averaged_within_a_sample(root: Path) -> None:
    add_run(root, "random", 0.9, 0.65, seed=1)
    (panel,) = read_panels(root, ["boxes"])
    random = next(curve for curve in panel.curves if curve.name == "random")
    assert random.points[-1].score.value == pytest.approx((0.45 + 0.65) / 2)


def test_smaller_runs_and_other_models_do_not_mix_in(root: Path) -> None:
    add_run(root, "clever", 0.75, 0.5, n=8)
    (panel,) = read_panels(root, ["boxes"])
    assert 0.75 not in panel.ratios
    add_run(root, "clever", 0.75, 0.5, model="huge")
    with pytest.raises(UserError, match="valid for --model: huge, tiny"):
        read_panels(root, ["boxes"])
    assert read_panels(root, ["boxes"], model="tiny") == [panel]


def test_command_line(root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "figure")
    arguments = ["--store", str(root), "--out", out, "--benchmarks"]
    assert main([*arguments, "boxes"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{out}.png"
    assert main([*arguments, "boxen"]) == 2
    assert "did you mean boxes?" in capsys.readouterr().err


def test_a_run_without_scores_is_named(root: Path) -> None:
    Store(root).run("boxes-clever--0.5-200").journal.clear()
    with pytest.raises(UserError, match=r"boxes-clever--0.5-200 .* has acc for 0 of 200 samples"):
        read_panels(root, ["boxes"])


def test_labels_keep_order_and_distance() -> None:
    placed = spread([0.1, 0.11, 0.12, 0.8], 0.05)
    assert placed == pytest.approx([0.06, 0.11, 0.16, 0.8])
    assert spread([0.2, 0.5], 0.05) == pytest.approx([0.2, 0.5])
    chain = spread([0.0, 0.05, 0.06, 0.14], 0.05)
    assert min(np.diff(chain)) >= 0.05 - 1e-9
