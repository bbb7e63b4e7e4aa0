"""Which rows may stand beside each other: readers of a store say so instead of mixing them."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.cli.curves import main
from espalier.harness.errors import UserError
from espalier.harness.reports.curves.comparison import read_panels
from espalier.harness.reports.curves.curve_points import CurvePanel
from espalier.harness.reports.curves.decoder_report import decoders, guidances, read_decoders
from espalier.harness.reports.curves.decoder_report import main as main_of_decoders
from espalier.harness.runs.run_key import run_key
from espalier.harness.specs.comparable import COSTS, check_comparable, name, policy
from espalier.harness.specs.run_spec import EngineSpec
from espalier.harness.store import RunDir, Store
from tests.refused import refused
from tests.report.stored_rows import settings
from tests.report.test_curves import add_run
from tests.report.test_decoders import add, guided
from tests.runs.helpers import Bench, make_bench

BLOCKS = (
    "model",
    "method",
    "engine",
    "benchmark",
    "draft",
    "artifacts",
    "judge",
    "backend",
    "weather",
)


def row(method: str = "divprune", label: str = "", **changes: Any) -> dict[str, Any]:
    """Return as much of a row as its comparison needs; keys with an underscore are settings."""
    under = {
        key: value
        for key, value in changes.items()
        if key.partition("_")[0] in BLOCKS and key not in ("model", "benchmark")
    }
    others = {key: value for key, value in changes.items() if key not in under}
    return {
        "run_key": "k",
        "model": "tiny",
        "method": method,
        "variant": "paper",
        "benchmark": "boxes",
        "ratio": 0.5,
        "budget_rule": "kept",
        "seed": 0,
        "n_samples": 8,
        "extra": {"label": label},
        "settings": settings(**under),
        **others,
    }


USUAL = row()


def test_what_a_model_can_give_keeps_no_rows_apart() -> None:
    """Rows of earlier versions list the signals of the model; those of now do not."""
    check_comparable([USUAL, row(model_facts={"signals": ["tile"]})])


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (row(engine_positions="renumbered"), "engine.positions (original, renumbered)"),
        (row(engine_backend="emulate"), "engine.backend (drop, emulate)"),
        (row(engine_batch_size=1), "engine.batch_size (8, 1)"),
        (row(engine_rescore=True), "engine.rescore (false, true)"),
        (row(model_template="plain"), "model.template (null, plain)"),
        (row(model_dtype="bfloat16"), "model.dtype (float32, bfloat16)"),
        (row(model_revision="def"), "model.revision (abc, def)"),
        (row(model_generation={"top_k": 1}), "model.generation.top_k (null, 1)"),
        (row(benchmark_limit=8), "benchmark.limit (null, 8)"),
        (row(draft={"name": "small"}), "draft.name (null, small)"),
        (row(artifacts=["a"]), 'artifacts ([], ["a"])'),
        (row(judge={"model": "other"}), "judge.model (null, other)"),
    ],
)
def test_one_cell_under_two_settings_is_an_error_that_names_them(
    other: dict[str, Any], difference: str
) -> None:
    line = refused(check_comparable, [USUAL, other])
    assert "cannot be mixed" in line
    assert difference in line
    key = difference.partition(" ")[0]
    assert f"--where '{key}=" in line


@pytest.mark.parametrize(
    "other",
    [
        row(ratio=0.9, engine_positions="renumbered"),
        row(seed=1, engine_backend="emulate"),
        row(ratio=0.9, artifacts=["a"]),
        row("random", model_dtype="bfloat16"),
        row("random", model_template="plain"),
        row("random", benchmark_limit=8),
        row("random", judge={"prompt": "abc"}),
        row("random", backend={"name": "vllm"}),
        row("random", weather={"rain": True}),
    ],
)
def test_a_curve_has_one_policy_and_a_panel_one_model(other: dict[str, Any]) -> None:
    assert "cannot be mixed" in refused(check_comparable, [USUAL, other])


@pytest.mark.parametrize(
    "other",
    [
        row("random", engine_positions="renumbered"),
        row("pearl", draft={"name": "small"}, engine_batch_size=None, engine_positions=None),
        row(ratio=0.9, engine_batch_size=1, engine_warmup=0),
        row(ratio=0.9, method_params={"scheme": [1, 2]}),
        row(label="K=3", engine_positions="renumbered"),
        row(benchmark="words", benchmark_limit=8),
        row(model="huge", model_dtype="bfloat16"),
    ],
)
def test_what_comes_with_method_ratio_or_benchmark_may_differ(other: dict[str, Any]) -> None:
    check_comparable([USUAL, other])


def test_a_long_value_is_cut_and_both_ends_of_a_difference_stay_apart() -> None:
    files = ["a" * 64, "b" * 64]
    line = refused(check_comparable, [row(artifacts=files), row(artifacts=files[::-1])])
    shown = line.partition("artifacts (")[2].partition(")")[0].split(", ")
    assert len(set(shown)) == 2
    assert max(map(len, shown)) < 20


def test_names_of_curves_have_what_is_off_its_default() -> None:
    assert name(USUAL) == "divprune"
    assert (
        name(row(label="K=3", engine_positions="renumbered")) == "divprune K=3 positions=renumbered"
    )
    assert policy(row(engine_backend="emulate", engine_positions=None)) == "backend=emulate"
    # What costs time and changes no answer is no name.
    assert policy(row(engine_batch_size=1, engine_rescore=True)) == ""
    assert {f"engine.{field.name}" for field in fields(EngineSpec)} > COSTS


# ---------------------------------------------------------------- curves


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Random and unpruned as usual, and one method under two policies: the later one is the worse."""
    root = tmp_path / "store"
    add_run(root, "none", 0.0, 0.9, layer=None, under={"engine_positions": None})
    add_run(root, "random", 0.5, 0.5)
    add_run(root, "clever", 0.5, 0.9)
    add_run(root, "clever", 0.5, 0.1, under={"engine_positions": "renumbered"})
    return root


def curves(panel: CurvePanel) -> dict[str, float]:
    first = panel.points.drop_duplicates("curve")
    return {point.curve: round(point.score.value, 3) for point in first.itertuples()}


def test_the_newest_row_is_not_taken_for_another_policy(store: Path) -> None:
    assert "engine.positions (original, renumbered)" in refused(read_panels, store, ["boxes"])


def test_a_condition_chooses_and_keeps_what_it_does_not_concern(store: Path) -> None:
    (usual,) = read_panels(store, ["boxes"], where=["engine.positions=original"])
    assert curves(usual) == {"clever": 0.9, "random": 0.5}
    (closed,) = read_panels(store, ["boxes"], where=["engine.positions=renumbered"])
    assert curves(closed) == {"clever positions=renumbered": 0.1}
    # The unpruned run drops nothing, so it has no policy for gaps.
    assert closed.full is not None
    assert closed.full == usual.full


def test_a_condition_on_the_draft_keeps_methods_without_one(tmp_path: Path) -> None:
    add_run(tmp_path, "random", 0.5, 0.5)
    for draft, score in (("small", 0.9), ("large", 0.9)):
        add_run(tmp_path, "pearl", 0.5, score, layer=None, under={"draft_name": draft})
    assert "draft.name (small, large)" in refused(read_panels, tmp_path, ["boxes"])
    (panel,) = read_panels(tmp_path, ["boxes"], where=["draft.name=small"])
    assert set(curves(panel)) == {"pearl", "random"}


def test_a_gain_is_over_random_under_the_same_policy(tmp_path: Path) -> None:
    closed = {"engine_positions": "renumbered"}
    add_run(tmp_path, "random", 0.5, 0.5)
    add_run(tmp_path, "clever", 0.5, 0.3, under=closed)
    (panel,) = read_panels(tmp_path, ["boxes"])
    assert dict(zip(panel.points.curve, panel.points.floor, strict=True)) == {
        "clever positions=renumbered": None,
        "random": None,
    }
    add_run(tmp_path, "random", 0.5, 0.2, label="other", under=closed)
    (panel,) = read_panels(tmp_path, ["boxes"], nearest=True)
    floors = dict(zip(panel.points.curve, panel.points.floor, strict=True))
    assert floors["clever positions=renumbered"] == "random other positions=renumbered"


@pytest.mark.parametrize(
    ("condition", "complaint"),
    [
        ("engine.position=original", "did you mean engine.positions?"),
        ("engine.positions=closed", "valid: null, original, renumbered"),
        ("positions", "--where='positions' is unknown"),
    ],
)
def test_a_condition_that_nothing_meets_is_refused(
    store: Path, capsys: pytest.CaptureFixture[str], condition: str, complaint: str
) -> None:
    out = str(store.parent / "figure")
    argv = ["--store", str(store), "--out", out, "--benchmarks", "boxes", "--where", condition]
    assert main(argv) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert complaint in line


def test_rows_of_older_code_give_way_and_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, (mean, seed) in enumerate(((0.2, 0), (0.8, 0))):
        add_run(tmp_path, "clever", 0.5, mean, code=f"code{place}", seed=seed)
        age(tmp_path, f"code{place}", place)
    add_run(tmp_path, "clever", 0.75, 0.5, n=8)
    old = Store(tmp_path).run("boxes-clever--0.75-8")
    silent = Store(tmp_path).run("silent")
    silent.commit({**(old.row() or {}), "n_samples": 200, "run_key": "silent"})
    silence(silent)
    argv = ["--store", str(tmp_path), "--out", str(tmp_path / "figure"), "--benchmarks", "boxes"]
    assert main(argv) == 0
    assert capsys.readouterr().err.splitlines() == [
        "boxes: 1 row passed over: without settings, from an older version",
        "boxes: 1 row passed over: with fewer than 200 samples",
        "boxes: 1 row passed over: of other code, a newer one has their place",
        "boxes: clever: no points above random, which did not run at the same place; valid: method=random",
    ]
    page = (tmp_path / "figure.md").read_text()
    assert "| clever | 80.0" in page
    assert "1 row passed over: without settings" in page


def age(root: Path, key: str, order: int) -> None:
    (path,) = [path for path in root.glob("runs/*/row.json") if f'"{key}"' in path.read_text()]
    os.utime(path, (order, order))


def silence(directory: RunDir) -> None:
    """Take the settings off a row, as rows of older versions have none."""
    directory.commit({name: value for name, value in directory.row().items() if name != "settings"})


def test_a_store_of_silent_rows_is_refused(store: Path) -> None:
    for directory in Store(store).folders():
        silence(directory)
    with pytest.raises(UserError, match=r"4 rows .* have no settings"):
        read_panels(store, ["boxes"])


# ---------------------------------------------------------------- decoders


def test_a_decoder_with_two_drafts_is_one_cell_under_two_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for dtype in ("float32", "bfloat16"):
        add(tmp_path / "store", "pearl", 0, overlap=True, draft_dtype=dtype)
    with pytest.raises(UserError, match=r"differ in draft\.dtype \(float32, bfloat16\)"):
        decoders(read_decoders(tmp_path / "store"))
    (cell,) = decoders(read_decoders(tmp_path / "store", where=["draft.dtype=float32"]))[
        "captions"
    ].result
    assert cell.row["settings"]["draft"]["dtype"] == "float32"
    argv = ["--store", str(tmp_path / "store"), "--write", str(tmp_path / "out")]
    assert main_of_decoders(argv) == 2
    assert "draft.dtype" in capsys.readouterr().err
    assert main_of_decoders([*argv, "--where", "draft.dtype=bfloat16"]) == 0


def test_acceptance_is_read_from_either_transport(tmp_path: Path) -> None:
    guided(tmp_path, 0.5)
    guided(tmp_path, 0.5, transport="sequential")
    guided(tmp_path, 0.5, transport="sequential", params={"guidance": "random"})
    assert [*guidances(read_decoders(tmp_path)).curve] == [
        "parallelvlm guidance=random transport=sequential",
        "parallelvlm transport=sequential",
    ]


def test_rows_that_no_piece_shows_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        add(tmp_path / "store", "vanilla_sd", 0)
    silence(RunDir(add(tmp_path / "store", "vanilla_sd", 0)))
    assert main_of_decoders(["--store", str(tmp_path / "store"), "--write", str(tmp_path)]) == 0
    errors = capsys.readouterr().err
    assert "1 row passed over: without settings" in errors
    assert "1 row passed over: no piece shows them" in errors


# ---------------------------------------------------------------- run.py


@pytest.fixture
def bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Bench:
    return make_bench(tmp_path / "store", capsys, monkeypatch)


def leaves(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in table.items():
        inner = isinstance(value, dict)
        values |= leaves(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return values


def test_a_row_states_all_of_its_key_that_is_not_code(bench: Bench) -> None:
    done = bench("method=divprune", "engine.positions=renumbered", "model.template=llava_vid").last
    described = json.loads((bench.store / "runs" / done["run_key"] / "spec.json").read_text())
    code = {"key_version", "method_class", "code", "packages"}
    assert set(described) == {"cell", "settings"} | code
    # The key can be computed anew from the row and the code.
    cell = {key: done[key] for key in described["cell"]}
    parts_of_code = {key: described[key] for key in code}
    parts_of_row = {"cell": cell, "settings": done["settings"]}
    assert run_key(parts_of_row | parts_of_code) == done["run_key"]
    assert done["settings"]["engine"]["positions"] == "renumbered"
    assert done["settings"]["model"]["template"] == "llava_vid"
    assert "positions" in Store(bench.store).rows()[0]["settings"]["engine"]


def test_two_policies_are_two_rows_with_their_names(bench: Bench) -> None:
    done = bench.success(
        "-m", "method=divprune", "engine.positions=original,renumbered", "ratio=0.5"
    )
    first, second = (leaves(row["settings"]) for row in done.rows)
    assert {key for key in first if first[key] != second[key]} == {"engine.positions"}
    assert "divprune positions=renumbered" in done.out


def test_settings_without_a_place_in_the_name_tell_rows_of_a_table_apart(bench: Bench) -> None:
    done = bench.success("-m", "method=divprune", "model.dtype=float32,bfloat16", "ratio=0.5")
    assert "divprune model.dtype=float32" in done.out
    assert "divprune model.dtype=bfloat16" in done.out


@pytest.mark.parametrize("key", ["curves", "report"])
def test_curves_that_would_mix_settings_are_refused_before_the_first_run(
    bench: Bench, key: str
) -> None:
    target = bench.store / "curve"
    sweep = ("-m", "method=divprune", "engine.positions=original,renumbered", f"{key}={target}")
    done = bench(*sweep)
    assert (done.code, bench.fake.specs, len(done.err.splitlines())) == (2, [], 1)
    assert f"{key}={str(target)!r}: rows of seedling on seedling_rec cannot be mixed" in done.err
    assert "engine.positions (original, renumbered)" in done.err
