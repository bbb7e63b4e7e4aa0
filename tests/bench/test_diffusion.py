"""The benchmark of denoising runs on a tiny decoder, end to end, and what its page says of targets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from espalier.harness.cost.bounds import Gain
from lab.bench import diffusion_bench as diffusion
from lab.bench.diffusion_page import step_targets, targets
from lab.bench.diffusion_sides import DiffusionRow

TINY = (
    *(
        setting
        for setting in diffusion.INSTANCE
        if ".text" not in setting and "projector" not in setting
    ),
    "model.facts.text={layers: 3, hidden: 32, intermediate: 32, heads: 2, kv_heads: 2, head_dim: 16}",
    "model.facts.projector=[144, 32, 32]",
)

ROW = DiffusionRow(
    name="d3tom",
    kept=0.1,
    visual=980,
    tokens=1100,
    flops=0.4,
    run_s=1.0,
    step_ms=100.0,
    loop_ms=1.0,
    method_share=0.01,
    promised_step=0.95,
    gain=Gain(2.0, 1.9, 2.1, 2.5),
)


def verdicts(*rows: DiffusionRow) -> list[str]:
    return [line.split(":")[0] for line in targets([row.entry() for row in rows])]


def test_a_target_is_met_or_missed() -> None:
    # Half of the time is saved where the FLOPs promise six tenths.
    assert ROW.reached == pytest.approx(0.5 / 0.6)
    low, high = ROW.reached_interval or (0, 0)
    assert (low, high) == (pytest.approx((1 - 1 / 1.9) / 0.6), pytest.approx((1 - 1 / 2.1) / 0.6))
    assert verdicts(ROW) == ["- missed", "- met"]
    assert verdicts(replace(ROW, gain=Gain(2.1, 2.0, 2.2, 2.5))) == ["- met", "- met"]
    assert verdicts(replace(ROW, method_share=0.021))[1] == "- missed"
    # The whole model and random tokens have nothing to meet.
    whole = replace(ROW, name="none", flops=1.0, gain=Gain(1, None, None, 1))
    assert verdicts(whole, ROW, replace(ROW, name="random")) == verdicts(ROW)


def test_a_step_after_a_cached_prompt_has_the_time_of_its_flops() -> None:
    whole = replace(ROW, name="none", step_ms=100.0, promised_step=1.0)
    for step, verdict in ((104.0, "missed"), (99.0, "met")):
        lines = step_targets("cached", [whole.entry(), replace(ROW, step_ms=step).entry()])
        assert [line.split(":")[0] for line in lines] == [f"- {verdict}"]
    within = replace(ROW, step_ms=61.0, promised_step=0.5).entry()
    assert step_targets("cached", [whole.entry(), within])[0].startswith("- missed")


@pytest.mark.slow
def test_it_runs_to_its_end_and_leaves_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diffusion, "ANSWER", {"max_new_tokens": 4, "steps": 4})
    options = ["--rounds", "2", "--only", "50,10", "--write", str(tmp_path)]
    assert diffusion.main([*options, *TINY]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "bench_diffusion.json").read_text()) == result
    whole, half, tenth, random = result["rows"]
    assert [row["name"] for row in result["rows"]] == ["none", "d3tom", "d3tom", "random"]
    assert [row["kept"] for row in result["rows"]] == [1.0, 0.5, 0.1, 0.1]
    assert whole["visual"] == 980
    assert (whole["flops"], whole["method_share"], whole["reached"]) == (1.0, 0.0, None)
    # Of three layers one and a half run whole at the steps behind the first; random tokens are gone at all of them.
    assert 1 > half["flops"] > tenth["flops"] > random["flops"]
    assert half["method_share"] > 0
    lines = (tmp_path / "bench_diffusion.md").read_text().splitlines()
    variants = result["variants"]
    assert list(variants) == list(diffusion.VARIANTS)
    for rows in variants.values():
        assert [row["kept"] for row in rows] == [1.0, 0.5, 0.1]
        assert 1 == rows[0]["promised_step"] > rows[1]["promised_step"] > rows[2]["promised_step"]
    assert sum(line.startswith("| ") for line in lines) == (2 + 4) + 4 * (2 + 3)
    assert sum(line.startswith(("- met", "- missed")) for line in lines) == 4 + 4 * 2
    assert lines[2].startswith("Written by `make bench-diffusion` on ")
