"""Curves from a store of made-up runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from lmms_eval.tasks.pope.utils import pope_aggregate_f1_score
from pandas.testing import assert_frame_equal

from espalier.harness.cli.curves import main
from espalier.harness.cost.budget import Budget
from espalier.harness.errors import UserError
from espalier.harness.evaluation.sample_contributions import influence
from espalier.harness.evaluation.samples import score_entries
from espalier.harness.reports.curves.comparison import read_panels
from espalier.harness.reports.curves.curve_files import file_name, write_curves
from espalier.harness.reports.curves.curve_points import CurvePanel, title_of
from espalier.harness.reports.curves.figures import spread
from espalier.harness.reports.curves.method_report import DOTS, draw_gains, write_report
from espalier.harness.reports.curves.report_page import config_names
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.stats import holm, paired_pvalue
from espalier.harness.store import Store
from tests import commands
from tests.report.stored_rows import settings

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
    under: dict[str, object] | None = None,
    **changes: object,
) -> None:
    """Write a run whose scores share each sample's difficulty with all others; `under` are settings off the usual."""
    difficulty = np.random.default_rng(0).permutation(n) / n
    name = "-".join(
        map(str, (benchmark, method, label, ratio, n, *(under or {}).values(), *changes.values()))
    )
    directory = Store(root).run(name)
    scores = {(benchmark, i): {"acc": float(d < mean)} for i, d in enumerate(difficulty)}
    directory.journal.append(*score_entries(scores))
    sites = [] if layer is None else [{"where": "layer", "layer": layer}]
    row = {
        "schema": 1,
        "run_key": name,
        "model": "tiny",
        "method": method,
        "variant": "paper",
        "benchmark": benchmark,
        "ratio": ratio,
        "budget_rule": "kept",
        "seed": 0,
        "n_samples": n,
        "metrics": {"acc": {"value": mean, "stderr": None}},
        "settings": settings(**(under or {})),
        # What acts later leaves more.
        "flops": {"share_of_full": 1 - ratio * (0.6 if layer else 0.9)},
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


def points_of_curve(panel: CurvePanel, curve: str) -> list[Any]:
    return [*panel.points[panel.points.curve == curve].itertuples()]


def floors_of(panel: CurvePanel) -> dict[str, str | None]:
    return dict(zip(panel.points.curve, panel.points.floor, strict=True))


@pytest.mark.slow
def test_a_method_without_random_dropping_at_its_place_is_named(root: Path) -> None:
    assert read_panels(root, ["boxes"])[0].notes == ()
    for label, layer in (("layer=3", 3), ("", None)):
        add_run(root, "deep", 0.5, 0.7, label=label, layer=layer)
    (panel,) = read_panels(root, ["boxes"])
    # What acts at no place of its own has no random counterpart.
    assert panel.notes == (
        "deep layer=3: no points above random, which did not run at the same place; "
        "valid: method=random method.params.layer=3",
    )


def test_points_are_means_with_paired_retention_and_gain(root: Path) -> None:
    (panel,) = read_panels(root, ["boxes"])
    assert (panel.metric, panel.n_samples, panel.ratios) == ("acc", N, (0.0, 0.5, 0.9))
    assert panel.full.value == pytest.approx(0.9)
    assert panel.full.low < 0.9 < panel.full.high
    # Methods first, controls last.
    assert [*floors_of(panel).items()] == [
        ("clever", "random"),
        ("clever layer=2", "random layer=2"),
        *(("random", None), ("random layer=2", None)),
    ]
    start, _, end = points_of_curve(panel, "clever")
    assert (end.score.value, end.retention.value) == (pytest.approx(0.81), pytest.approx(0.9))
    assert end.gain.value == pytest.approx(0.36)
    assert end.gain.low > 0.28
    assert end.gain_p < 0.001
    # Nothing is chosen at ratio 0.
    assert (start.gain, start.retention.value) == (None, 1.0)


def test_losses_are_corrected_over_all_points_of_a_panel_as_gains_are(tmp_path: Path) -> None:
    add_run(tmp_path, "none", 0.0, 0.9, layer=None)
    for ratio, random, means in ((0.5, 0.86, (0.87, 0.8)), (0.9, 0.7, (0.84, 0.89))):
        add_run(tmp_path, "random", ratio, random)
        for method, mean in zip(("first", "second"), means, strict=True):
            add_run(tmp_path, method, ratio, mean)
    (panel,) = read_panels(tmp_path, ["boxes"])
    points = panel.points
    losses = [paired_pvalue(ours, panel.unpruned) for ours in points.scores]
    assert [*points.lost_p] == pytest.approx(holm(losses))
    assert holm(losses) != pytest.approx(losses)
    gains = points[points.gain_p.notna()]
    assert [*gains.gain_p_holm] == pytest.approx(holm([*gains.gain_p]))


@pytest.mark.slow
def test_files_and_table(root: Path, tmp_path: Path) -> None:
    png, svg, table, latex, points = write_curves(root, tmp_path / "new" / "curves")
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "clever layer=2" in svg.read_text()
    text = table.read_text()
    assert "| method | 100 % | 50 % | 10 % | FLOPs |" in text
    # Equal counts are no equal cost: what acts later leaves more of the prefill.
    lines = {line.split(" | ")[0]: line for line in reversed(text.splitlines())}
    assert lines["| clever"].endswith("| 100 / 55 / 19 % |")
    assert lines["| clever layer=2"].endswith("| 100 / 70 / 46 % |")
    assert "| unpruned | 90.0 [85.0, 93.8] |" in text
    assert "+36.0 [" in text
    assert pd.read_csv(points).score.max() == pytest.approx(0.91)
    assert r"unpruned 90.0}} \\" in latex.read_text()
    first = svg.read_bytes()
    write_curves(root, tmp_path / "new" / "curves")
    assert svg.read_bytes() == first


def test_seeds_are_averaged_within_a_sample(root: Path) -> None:
    add_run(root, "random", 0.9, 0.65, seed=1)
    (panel,) = read_panels(root, ["boxes"])
    assert points_of_curve(panel, "random")[-1].score.value == pytest.approx((0.45 + 0.65) / 2)


@pytest.mark.slow
def test_smaller_runs_and_other_models_do_not_mix_in(root: Path) -> None:
    add_run(root, "clever", 0.75, 0.5, n=8)
    (panel,) = read_panels(root, ["boxes"])
    assert 0.75 not in panel.ratios
    add_run(root, "clever", 0.75, 0.5, model="huge")
    with pytest.raises(UserError, match="valid for --model: huge, tiny"):
        read_panels(root, ["boxes"])
    (again,) = read_panels(root, ["boxes"], model="tiny")
    assert_frame_equal(again.points, panel.points)


@pytest.mark.slow
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
    assert spread([0.1, 0.11, 0.12, 0.8], 0.05) == pytest.approx([0.06, 0.11, 0.16, 0.8])
    assert spread([0.2, 0.5], 0.05) == pytest.approx([0.2, 0.5])
    assert min(np.diff(spread([0.0, 0.05, 0.06, 0.14], 0.05))) >= 0.05 - 1e-9


# ---------------------------------------------------------------- every method against random


@pytest.fixture
def against(tmp_path: Path) -> Path:
    """Runs of real methods: DivPrune good, HiRED bad, VisionZip like random; FastV and PyramidDrop between layers."""
    add_run(tmp_path, "none", 0.0, 0.9, layer=None)
    for ratio, random in ((0.5, 0.8), (0.9, 0.45)):
        add_run(tmp_path, "random", ratio, random)
        add_run(tmp_path, "random", ratio, random + 0.05, label="layer=2", layer=2)
        add_run(tmp_path, "divprune", ratio, random + 0.1)
        add_run(tmp_path, "visionzip", ratio, random)
        label = "budget=stripes official"
        add_run(tmp_path, "hired", ratio, random - 0.1, label=label, variant="official")
        add_run(tmp_path, "fastv", ratio, random + 0.1, label="queries=mean", layer=2)
        add_run(tmp_path, "pyramiddrop", ratio, random, layer=1)
    add_run(tmp_path, "uniform", 0.5, 0.8)
    return tmp_path


def report_of(store: Path, out: Path, *left_out: tuple[RunSpec, str]) -> dict[str, str]:
    """Write the report of all runs of a store; return its files by name."""
    spec = replace(
        commands.spec_of("method=fastv", "ratio=0.9"),
        store=store,
        report=out,
        model=replace(commands.spec_of("method=fastv").model, name="tiny"),
    )
    paths = list(write_report(spec, {row["run_key"] for row in Store(store).rows()}, left_out))
    assert {path.name for path in paths} == {path.name for path in out.iterdir()}
    return {path.name: path.read_text() for path in paths}


def row_of(page: str, name: str) -> list[str]:
    """Cells of the one table row that begins with a name."""
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.slow
def test_files_of_a_report_have_names_that_links_can_hold(tmp_path: Path) -> None:
    for method, mean in (("random", 0.5), ("divprune", 0.6)):
        add_run(tmp_path / "store", method, 0.5, mean, benchmark="task:pope")
    pages = report_of(tmp_path / "store", tmp_path / "out")
    assert set(pages) == {"README.md", "task_pope.md", "task_pope.svg"}
    assert "[task:pope](task_pope.md)" in pages["README.md"]
    assert "](task_pope.svg)" in pages["task_pope.md"]
    assert file_name("pope") == "pope"
    hostile = ("\x1b[2J", "a|b", "a\nb", "\u202eexe", "x" * 3000, "ü" * 3000, "../..", "<b>", '"')
    names = {file_name(name) for name in hostile}
    assert len(names) == len(hostile)
    assert all(
        len(name.encode()) < 200 and not set(name) & set("/|<>\"'\n\x1b\u202e") for name in names
    )
    assert file_name("a|b") != file_name("a/b") == "a_b"


def test_a_method_between_layers_is_compared_with_random_between_layers(against: Path) -> None:
    (strict,) = read_panels(against, ["boxes"])
    (near,) = read_panels(against, ["boxes"], nearest=True)
    floors = [floors_of(panel) for panel in (strict, near)]
    assert [floor["pyramiddrop paper"] for floor in floors] == [None, "random layer=2"]
    assert all(floor["divprune"] == "random" for floor in floors)
    assert all(floor["fastv paper"] == "random layer=2" for floor in floors)
    # Nothing else moves, but corrections for the number of comparisons: what has a floor of its own place keeps it.
    kept, moved = (
        panel.points[panel.points.floor.notna()].drop(columns="gain_p_holm")
        for panel in (strict, near)
    )
    others = moved[moved.curve != "pyramiddrop paper"]
    assert_frame_equal(kept.reset_index(drop=True), others.reset_index(drop=True))


def test_without_random_between_layers_such_methods_have_no_floor(against: Path) -> None:
    for path in against.glob("runs/boxes-random-layer=2*"):
        (path / "row.json").unlink()
    (panel,) = read_panels(against, ["boxes"], nearest=True)
    assert {point.floor for point in panel.points.itertuples() if point.layer} == {None}


def test_sites_in_the_tower_count_as_before_the_decoder(against: Path) -> None:
    sites = [{"where": "tower", "layer": 2}, {"where": "layer", "layer": 1}]
    add_run(against, "tome", 0.9, 0.5, extra={"headline": "acc", "label": "", "sites": sites})
    (panel,) = read_panels(against, ["boxes"])
    (point,) = points_of_curve(panel, "tome paper")
    assert (point.layer, point.floor) == (0, "random")


@pytest.mark.slow
def test_tables_mark_what_lies_above_and_below_random(against: Path, tmp_path: Path) -> None:
    page = report_of(against, tmp_path / "report")["boxes.md"]
    assert "acc in percent on 200 samples of `tiny`" in page
    assert "; 90.0 with all of them" in page
    half, tenth = row_of(page, "divprune")
    assert half.startswith("90.0, +10.0 [")
    assert tenth.startswith("55.0, +10.0 [")
    assert half.endswith("**above***")
    assert "**above**" in tenth
    # Names are those of the config files, not of the parameters.
    assert all("**below**" in cell for cell in row_of(page, "hired_official"))
    assert row_of(page, "visionzip_paper")[0] == "80.0, +0.0 [-1.8, +1.8]"
    assert row_of(page, "uniform")[1] == "-"
    assert "**above**" in row_of(page, "fastv_paper")[0]
    assert row_of(page, "pyramiddrop_paper (layer 1)")[0].startswith("80.0, -5.5 [")
    assert row_of(page, "random")[0].startswith("80.0 [")
    before, between = page.index("## Before the decoder"), page.index("## Between decoder layers")
    assert before < page.index("| divprune |") < page.index("| hired_official |") < between
    assert between < page.index("| random_layer2 |") < page.index("| fastv_paper |")


@pytest.mark.slow
def test_the_overview_has_a_sign_for_each_ratio(against: Path, tmp_path: Path) -> None:
    text = report_of(against, tmp_path / "report")["README.md"]
    signs = {"divprune": "++", "hired_official": "--", "visionzip_paper": "..", "uniform": ". "}
    assert {name: row_of(text, name) for name in signs} == {
        name: [f"`{sign}`"] for name, sign in signs.items()
    }
    # Best first.
    assert (
        text.index("| divprune |")
        < text.index("| visionzip_paper |")
        < text.index("| hired_official")
    )
    assert "[boxes](boxes.md)" in text


@pytest.mark.slow
def test_what_was_left_out_is_listed_with_its_reason(against: Path, tmp_path: Path) -> None:
    spec = commands.spec_of("method=fastv_paper", "ratio=0.9")
    spec = replace(spec, benchmark=replace(spec.benchmark, name="boxes"))
    other = replace(spec, benchmark=replace(spec.benchmark, name="elsewhere"))
    page = report_of(against, tmp_path / "report", (spec, "no way"), (other, "nor"))["boxes.md"]
    assert "## Left out" in page
    assert "| fastv_paper | 10 % | no way |" in page
    assert "nor" not in page.split("## Left out")[1]


def test_a_policy_off_its_default_stays_in_a_configs_name() -> None:
    names = {"random": "random", "random layer=2": "random_layer2"}
    for name, title in {
        "random layer=2": "random_layer2",
        "random layer=2 backend=emulate": "random_layer2 backend=emulate",
        "divprune layer=2": "divprune layer=2",
    }.items():
        assert title_of(name, names) == title


@pytest.mark.slow
def test_a_row_that_lacks_samples_is_counted_on_the_page(against: Path, tmp_path: Path) -> None:
    add_run(against, "divprune", 0.75, 0.5, n=N - 1)
    page = report_of(against, tmp_path / "report")["boxes.md"]
    assert f"1 row passed over: with fewer than {N} samples." in page


@pytest.mark.slow
def test_a_report_without_random_says_what_it_needs(against: Path, tmp_path: Path) -> None:
    for path in against.glob("runs/boxes-random-*"):
        (path / "row.json").unlink()
    with pytest.raises(UserError, match="report needs method=random among the runs of boxes"):
        report_of(against, tmp_path / "report")


@pytest.mark.slow
def test_dots_stand_at_points_above_random_and_take_the_colour_of_the_verdict(
    against: Path,
) -> None:
    (panel,) = read_panels(against, ["boxes"], nearest=True)
    shown = panel.groups()
    names = config_names({"random", "fastv", "hired", "visionzip"}, Budget("kept", 0.5))
    half, _ = draw_gains(panel, shown, names).axes
    labels = [tick.get_text() for tick in half.get_yticklabels()]
    assert labels[0] == "before the decoder"
    assert labels.index("between decoder layers") == shown[0].points.curve.nunique()
    dots = {
        labels[int(line.get_ydata()[0])]: (line.get_xdata()[0], line.get_markerfacecolor())
        for line in half.get_lines()
        if len(line.get_xdata()) == 1
    }
    expected = {
        "divprune": (pytest.approx(10.0), DOTS["above"][2]),
        "hired_official": (pytest.approx(-9.5), DOTS["below"][2]),
        "visionzip_paper": (pytest.approx(0.0, abs=1e-9), DOTS[""][2]),
    }
    assert {name: dots[name] for name in expected} == expected
    # Scores stand beside them, and no whisker passes what a difference can be.
    written = {labels[int(text.get_position()[1])]: text.get_text() for text in half.texts}
    assert (written["divprune"], written["hired_official"]) == ("90.0", "70.5")
    assert written["before the decoder"] == "random: 80.0"


def test_names_of_config_files_are_found_by_their_settings() -> None:
    names = config_names({"fastv", "random", "pyramiddrop"}, Budget("kept", 0.9))
    expected = {
        "fastv paper": "fastv_paper",
        "fastv official": "fastv_official",
        "random layer=2": "random_layer2",
        # What repeats the budget is no setting: the name is the same at every ratio.
        "pyramiddrop paper": "pyramiddrop_paper",
    }
    assert {label: names[label] for label in expected} == expected


def add_f1(root: Path, method: str, ratio: float, right: float, shares: bool = True) -> float:
    """Write a run whose headline is F1, as scoring leaves it, and return its F1; units are pairs of samples."""
    rng = np.random.default_rng(7)
    wants, ease = rng.random(N) < 0.5, np.repeat(rng.random(N // 2), 2)
    raw = [
        {"prediction": "yes" if a else "no", "ground_truth": "yes" if t else "no"}
        for a, t in zip(np.where(ease < right, wants, ~wants), wants, strict=True)
    ]
    contributions = influence(pope_aggregate_f1_score, raw, [i // 2 for i in range(N)])
    add_run(root, method, ratio, right, benchmark="yes_no", n=N)
    run = next(
        directory
        for directory, row in Store(root).finished()
        if row["run_key"].startswith(f"yes_no-{method}-")
    )
    run.journal.clear()
    scores = {("yes_no", i): {"acc": float(value)} for i, value in enumerate(contributions.values)}
    of = {("yes_no", i): {"acc": i - i % 2} for i in range(N)}
    run.journal.append(*score_entries(scores if shares else {}, of))
    row = run.row()
    note = None if shares else "benchmark.blocks=0: computed once only"
    counts = {"samples": len(scores) if shares else 0, "units": N // 2, "note": note}
    row["extra"]["aggregation"] = {"acc": {"how": "influence" if shares else "once", **counts}}
    run.commit(row)
    return float(pope_aggregate_f1_score(raw))


def test_a_headline_that_is_no_mean_has_curves_with_paired_intervals(tmp_path: Path) -> None:
    full = add_f1(tmp_path, "none", 0.0, 0.95)
    clever, random = add_f1(tmp_path, "clever", 0.5, 0.85), add_f1(tmp_path, "random", 0.5, 0.7)
    (panel,) = read_panels(tmp_path, ["yes_no"])
    (point,) = points_of_curve(panel, "clever")
    assert (panel.full.value, point.score.value) == (pytest.approx(full), pytest.approx(clever))
    assert point.retention.value == pytest.approx(clever / full)
    assert point.gain.value == pytest.approx(clever - random)
    assert 0 < point.gain.low < clever - random < point.gain.high
    # A hundred pairs, not two hundred samples: pairs are answered alike, so the interval is wider by about a half.
    share = clever * (1 - clever) / (N // 2)
    assert point.score.high - point.score.low > 1.96 * 2 * share**0.5 * 0.8


def test_a_headline_without_contributions_says_why_there_is_no_curve(tmp_path: Path) -> None:
    add_f1(tmp_path, "none", 0.0, 0.95, shares=False)
    with pytest.raises(UserError, match=r"acc: benchmark\.blocks=0: computed once"):
        read_panels(tmp_path, ["yes_no"])


def test_runs_with_other_units_do_not_stand_beside_each_other(tmp_path: Path) -> None:
    add_f1(tmp_path, "none", 0.0, 0.95)
    add_run(tmp_path, "random", 0.5, 0.7, benchmark="yes_no", n=N)
    with pytest.raises(
        UserError, match="yes_no: runs differ in which samples are one unit of statistics"
    ):
        read_panels(tmp_path, ["yes_no"])


@pytest.mark.parametrize(
    ("whole", "evicted", "noted"), [(1, 1, True), (0.5, 1, False), (1, 0.5, False)]
)
def test_curves_that_evict_behind_answers_of_one_token_say_so(
    tmp_path: Path, whole: float, evicted: float, noted: bool
) -> None:
    def extra(first_token: float, **more: object) -> dict[str, object]:
        return {"headline": "acc", "label": "", "sites": [], "first_token": first_token, **more}

    add_run(tmp_path, "none", 0.0, 0.9, extra=extra(whole))
    for name in ("aircache", "random+h2o"):
        cache = {"cache": {"ratio": 0.9}, "discriminates": evicted < 1}
        add_run(tmp_path, name, 0.9, 0.9, extra=extra(evicted, **cache))
    (panel,) = read_panels(tmp_path, ())
    assert (len(panel.notes) == 1) == noted
    if noted:
        assert panel.notes[0].startswith("aircache, random+h2o: every answer is one token")
    assert not panel.points.floor.any()


@pytest.mark.slow
def test_a_report_without_methods_has_its_random_tokens(root: Path, tmp_path: Path) -> None:
    keys = [run.path.name for run, _ in Store(root).finished() if "clever" not in run.path.name]
    (panel,) = read_panels(root, (), run_keys=keys)
    figure = draw_gains(panel, panel.groups(), {})
    figure.savefig(tmp_path / "a.svg")
    assert len(figure.axes) == len(panel.ratios)
