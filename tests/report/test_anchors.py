"""Anchors: presets that compose, and a table on rows that were made up for it."""

from __future__ import annotations

from typing import Any

import pytest

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.config.group_table import listing
from espalier.harness.reports.tables import anchors
from espalier.harness.reports.tables.anchors import Anchor, compare_anchors, read_anchors, table
from espalier.harness.reports.tables.cell_settings import compared_settings


def made_up(model: str, benchmark: str, metric: str, value: float, **more: Any) -> dict[str, Any]:
    anchor = Anchor(
        *("", model, more.get("prompt", "original"), benchmark, metric, 0.0),
        *("", "", "", "", ""),
    )
    settings: dict[str, Any] = {"method": {"params": {}}}
    values = {**compared_settings(anchors.run_of(anchor)).values, **more.get("settings", {})}
    for key, setting in values.items():
        part, _, name = key.partition(".")
        settings.setdefault(part, {})[name] = setting
    settings["benchmark"]["limit"] = more.get("limit")
    return {
        "model": model,
        "benchmark": benchmark,
        "method": more.get("method", "none"),
        "metrics": {metric: {"value": value, "stderr": None}},
        "n_samples": more.get("samples", 100),
        "settings": settings,
    }


@pytest.mark.slow
def test_every_anchor_is_a_preset_that_runs_its_cell() -> None:
    command = read_command(["-m", "+experiment=anchors", "model.weights=random"])
    assert command.sweep
    specs = {}
    for cell in command.cells:
        spec = build_spec(cell)
        assert (spec.method.name, spec.budget.ratio) == ("none", 0)
        specs[spec.model.name, spec.model.prompt.name, spec.benchmark.name] = spec
    listed = read_anchors()
    assert set(specs) == {(anchor.model, anchor.prompt, anchor.benchmark) for anchor in listed}
    assert len(command.cells) == len(listed)
    assert {anchor.name for anchor in listed} == {
        line.split()[0] for line in listing("anchor").splitlines()[1:]
    }
    for anchor in listed:
        assert (
            anchor.metric in specs[anchor.model, anchor.prompt, anchor.benchmark].benchmark.metrics
        )
        assert 0 < anchor.published < 100
        assert anchor.url.startswith("https://arxiv.org/abs/")


def test_measured_and_published_stand_side_by_side() -> None:
    rows = [
        made_up("llava15_7b", "pope", "pope_f1_mean", 0.5),
        made_up("llava15_7b", "pope", "pope_f1_mean", 0.8541, samples=9000),  # the newest
        made_up("llava15_7b", "pope", "pope_f1_mean", 0.2, method="fastv"),
        made_up("llava15_7b", "gqa", "exact_match", 0.6131, samples=12578),
        made_up("llava15_7b", "mmbench_en", "gpt_eval_score", 64.2, samples=4329),  # in percent
        made_up("llava_ov_7b", "textvqa", "exact_match", 0.7, prompt="vlmevalkit"),
        made_up("llava_ov_7b", "mmbench_en", "gpt_eval_score", 82.3),  # under other prompts
    ]
    frame = compare_anchors(read_anchors(), rows)
    comparisons = {comparison.name: comparison for comparison in frame.itertuples(index=False)}
    pope = comparisons["llava15_7b_pope"]
    assert pope.measured == pytest.approx(85.41)
    assert (pope.verdict, pope.samples) == ("near", 9000)
    gqa = comparisons["llava15_7b_gqa"]
    assert (gqa.difference, gqa.verdict) == (pytest.approx(61.31 - 61.9), "FAR")
    assert comparisons["llava15_7b_mmbench_en"].verdict == "near"  # exactly half a point
    assert comparisons["llava_ov_7b_textvqa"].verdict == "FAR"
    other_prompts = "not run (model.prompt=original, not vlmevalkit)"
    assert comparisons["llava_ov_7b_mmbench_en"].verdict == other_prompts
    lines = table(frame).splitlines()
    assert any("| 61.3 | 61.9 | -0.6 | FAR | 12,578 |" in line for line in lines)


def test_a_part_of_a_benchmark_yields_to_the_whole_and_is_told() -> None:
    part = made_up("llava15_7b", "gqa", "exact_match", 0.62, limit=50, samples=50)
    whole = made_up("llava15_7b", "gqa", "exact_match", 0.5)
    listed = [anchor for anchor in read_anchors() if anchor.name == "llava15_7b_gqa"]
    assert compare_anchors(listed, [part]).verdict[0] == "near, of a part"
    assert compare_anchors(listed, [whole, part]).measured[0] == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.weights", "random"),
        ("model.transparency", "white"),
        ("model.quantisation", "int4"),
        ("benchmark.data", "abc"),
        ("benchmark.text", "Where?"),
        ("engine.decode", "generate"),
        ("backend.name", "vllm"),
    ],
)
def test_a_row_of_other_settings_is_no_anchors(key: str, value: str) -> None:
    listed = [anchor for anchor in read_anchors() if anchor.name == "llava15_7b_gqa"]
    other = made_up("llava15_7b", "gqa", "exact_match", 0.62, settings={key: value})
    compared = compare_anchors(listed, [other])
    assert compared.measured[0] is None
    assert compared.verdict[0].startswith(f"not run ({key}={value}, not ")
    fitting = made_up("llava15_7b", "gqa", "exact_match", 0.5)
    assert compare_anchors(listed, [fitting, other]).measured[0] == pytest.approx(50.0)


def test_the_command_says_what_is_far_by_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    assert anchors.main([f"--store={tmp_path}"]) == 0
    assert capsys.readouterr().out.count("not run") == len(read_anchors())


def test_an_anchor_says_where_it_is_printed() -> None:
    model = "llava15_7b"
    anchor = Anchor("a", model, "original", "gqa", "exact_match", 60.0, "P", "u", "1", "r", "c")
    compared = compare_anchors([anchor], [made_up(model, "gqa", "exact_match", 0.6)])
    assert "[P](u), table 1, r, c |" in table(compared)
