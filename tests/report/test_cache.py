"""Tables and the picture of cache compressors from a store of made-up runs, and the sweeps that bring real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from espalier.harness.errors import UserError
from espalier.harness.evaluation.samples import score_entries
from espalier.harness.reports.curves.cache_report import (
    PRESETS,
    REPORT,
    ablation,
    compared,
    main,
    read_caches,
    stacked,
)
from espalier.harness.reports.curves.comparison import read_panels
from espalier.harness.store import Store
from tests import commands
from tests.report.stored_rows import settings

N, LAYERS, VISUAL = 200, 6, 144
FILES = {"aircache", "random_kv", "elastic merged=0.0"}


def add(
    root: Path,
    method: str,
    mean: float,
    ratio: float = 0.9,
    cache: float | None = None,
    label: str = "",
    benchmark: str = "reading",
    **params: object,
) -> None:
    """Write a run whose scores share each sample's difficulty with all others; `cache` is the share evicted."""
    difficulty = np.random.default_rng(0).permutation(N) / N
    directory = Store(root).run(f"{benchmark}-{method}-{label}-{ratio}")
    scores = {(benchmark, i): {"acc": float(level < mean)} for i, level in enumerate(difficulty)}
    directory.journal.append(*score_entries(scores))
    drops = method.split("+")[0] in ("random", "clever")
    tokens = VISUAL * (1 - ratio) if drops else VISUAL
    entries = LAYERS * tokens * (1 - (cache or 0))
    extra = {
        "headline": "acc",
        "label": label,
        "sites": [{"where": "layer", "layer": 0}] if drops else [],
        "params": params,
    }
    if cache is not None:
        extra["cache"] = {"ratio": cache, "share": 1 - cache}
    directory.commit(
        {
            "schema": 1,
            "run_key": directory.path.name,
            "model": "tiny",
            "method": method,
            "variant": "paper",
            "benchmark": benchmark,
            "ratio": ratio,
            "budget_rule": "kept",
            "seed": 0,
            "n_samples": N,
            "metrics": {"acc": {"value": mean, "stderr": None}},
            "settings": settings(),
            "tokens": {"visual": VISUAL, "kept_final": tokens, "kv_entries": entries},
            "flops": {"share_of_full": tokens / VISUAL},
            "time": {"prefill_ms": 20.0 * tokens / VISUAL},
            "memory": {"kv_bytes": 1024 * (entries + 64)},
            "extra": extra,
        }
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    add(tmp_path, "none", 0.9, ratio=0.0)
    for ratio, random, good in ((0.5, 0.8, 0.9), (0.9, 0.5, 0.8)):
        add(tmp_path, "random_kv", random, ratio, ratio)
        add(tmp_path, "aircache", good, ratio, ratio, allocation="lorenz", window="elite")
        add(tmp_path, "elastic", random - 0.2, ratio, ratio, label="merged=0.0")
    return tmp_path


def test_compressors_stand_beside_random_entries(root: Path, tmp_path: Path) -> None:
    written, missing = REPORT.write(root, tmp_path / "out")
    assert [path.name for path in written] == ["curves.png", "curves.svg", "README.md"]
    assert written[0].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "visual cache entries removed (%)" in written[1].read_text()
    lines = {line.split(" | ")[0]: line for line in written[2].read_text().splitlines()}
    assert lines["| random_kv"].startswith("| random_kv | 80.0 [")
    assert "80.0, +30.0 [" in lines["| aircache"]
    assert lines["| aircache"].endswith("**above*** |")
    # A row is named by the setting that makes it.
    assert lines["| elastic_paper"].endswith("**below*** |")
    assert len(missing) == 2
    assert "+experiment=kv_stack" in missing[1]


def test_random_tokens_are_no_floor_of_random_entries(root: Path) -> None:
    add(root, "random", 0.3)
    add(root, "clever", 0.4)
    (panel,) = read_panels(root, ["reading"])
    floors = dict(zip(panel.points.curve, panel.points.floor, strict=True))
    assert (floors["aircache"], floors["clever"]) == ("random_kv", "random")
    assert (floors["random"], floors["random_kv"]) == (None, None)


@pytest.mark.slow
def test_windows_and_budgets_make_a_grid(root: Path, tmp_path: Path) -> None:
    add(root, "aircache", 0.7, 0.9, 0.9, "window=all", allocation="lorenz", window="all")
    add(root, "aircache", 0.6, 0.9, 0.9, "x", allocation="uniform", window="all")
    cells = read_caches(root)
    assert len(ablation(cells)) == 3
    assert "all" not in set(compared(cells, FILES).window)
    page = REPORT.write(root, tmp_path / "out")[0][-1].read_text()
    assert "| window | lorenz | uniform |" in page
    (line,) = [line for line in page.splitlines() if line.startswith("| all |")]
    assert line.startswith("| all | 70.0 [")
    assert " | 60.0 [" in line
    (line,) = [line for line in page.splitlines() if line.startswith("| elite |")]
    assert line.endswith("| - |")


def test_two_reducers_are_one_part_of_a_pair(root: Path) -> None:
    add(root, "random+clever", 0.5)
    add(root, "random+clever+aircache", 0.4, 0.9, 0.9)
    cells = read_caches(root)
    parts = {method: pair for method, *pair in cells[["method", "first", "second"]].values}
    assert parts["random+clever+aircache"] == ["random+clever", "aircache"]
    assert parts["random+clever"] == ["random+clever", ""]


@pytest.mark.slow
def test_two_methods_stand_beside_their_parts(root: Path, tmp_path: Path) -> None:
    add(root, "clever", 0.85, 0.5)
    add(root, "clever", 0.7, 0.75)
    add(root, "clever+aircache", 0.75, 0.5, 0.9, label="cache_ratio=0.9")
    (cells,) = stacked(read_caches(root)).values()
    named = [*zip(cells.method, cells.ratio, strict=True)]
    assert named == [("none", 0.0), ("clever", 0.5), ("aircache", 0.9), ("clever+aircache", 0.5)]
    add(root, "random+aircache", 0.6, 0.5, 0.9, label="Random(layer=2) cache_ratio=0.9")
    page = REPORT.write(root, tmp_path / "out")[0][-1].read_text()
    assert "| random+aircache Random(layer=2) | 0.5 | 0.9 | 60.0 [" in page
    rows = {line.split(" | ")[0]: line.strip("|").split(" | ") for line in page.splitlines()}
    tokens, entries, flops, ms, size, share = rows["| clever+aircache"][4:]
    assert (tokens, entries, flops, ms) == ("50.0 %", "5.0 %", "50.0 %", "10.0")
    assert (size, share.strip()) == ("107 KiB", "11.6 %")
    alone = [line for line in page.splitlines() if line.startswith("| aircache | - | 0.9 |")]
    assert len(alone) == 1
    assert "| 100.0 % | 10.0 % | 100.0 % | 20.0 |" in alone[0]
    # Behind `none` it stands for itself, as a row of the same sweep.
    add(root, "none+aircache", 0.8, 0.0, 0.9, label="cache_ratio=0.9")
    (cells,) = stacked(read_caches(root)).values()
    assert [*cells.method] == [
        "none",
        "clever",
        "none+aircache",
        "clever+aircache",
        "random+aircache",
    ]


def test_what_cannot_be_shown_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    add(tmp_path, "none", 0.9, ratio=0.0)
    assert main(["--store", str(tmp_path), "--write", str(tmp_path / "out")]) == 2
    assert "no finished runs of a cache compressor" in capsys.readouterr().err
    add(tmp_path, "random_kv", 0.5, 0.9, 0.9)
    with pytest.raises(UserError, match=r"--model.*'huge'.*tiny|huge"):
        read_caches(tmp_path, "huge")


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS.values())
def test_the_sweeps_compose(preset: str, tmp_path: Path) -> None:
    cells = commands.cells_of(preset, f"store={tmp_path}")
    assert {cell["model"]["name"] for cell in cells} == {"seedling"}
    assert {cell["benchmark"]["name"] for cell in cells} <= {
        "seedling_ocr",
        "seedling_caption",
    }
