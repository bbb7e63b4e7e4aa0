"""Cost estimates: the same count as a row for the same tokens, and named reasons for cells without an estimate."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import Command, read_command
from espalier.harness.cost.budget import NOMINAL_TEXT
from espalier.harness.cost.flops import head_flops, layer_flops, text_flops
from espalier.harness.kinds.checks.length_check import decoder_bytes
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.kinds.method_stack import method_of
from espalier.harness.runs.cluster.cluster_spec import cluster_of
from espalier.harness.runs.cluster.cluster_sweep import cells_of
from espalier.harness.runs.cluster.cost_estimate import UnknownCost, cost_of
from espalier.harness.runs.cluster.dry_run import PlannedCell, jobs_of, lines_of, plan
from espalier.harness.runs.runner import Runner
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.digests import Digests
from tests.runs.helpers import make_bench


@cache
def composed(*argv: str) -> Command:
    command = read_command(argv)
    assert command is not None
    return command


def settled(*argv: str) -> RunSpec:
    spec = build_spec(composed(*argv).cells[0])
    method = method_of(spec.method)
    return kind_of(method, spec).normalise(spec, method)


def cost(*argv: str) -> int:
    spec = settled(*argv)
    return cost_of(spec, method_of(spec.method)).flops


def planned(*argv: str) -> tuple[list[PlannedCell], list[str]]:
    command = composed(*argv)
    cluster = cluster_of(command.cells)
    cells = [plan(cell, Digests(), Runner()) for cell in cells_of(command, cluster)]
    return cells, list(lines_of(cells, cluster))


def test_a_cell_costs_its_layers_and_heads_times_its_samples() -> None:
    facts = settled().model.facts
    head = 2 * facts.text.hidden * facts.vocabulary

    def by_hand(*entering: int) -> int:
        return 10 * (sum(layer_flops(facts.text, n + NOMINAL_TEXT) for n in entering) + head)

    ten = ("limit=10",)
    assert cost(*ten, "method=none") == by_hand(*[144] * 6)
    assert cost(*ten, "method=random", "ratio=0.75") == by_hand(*[36] * 6)
    # After layer 2 a quarter of the tokens is left.
    assert cost(*ten, "method=fastv", "ratio=0.75") == by_hand(144, 144, *[36] * 4)
    # What evicts cache entries saves nothing in the prefill; what stands before it does.
    assert cost(*ten, "method=snapkv", "ratio=0.75") == by_hand(*[144] * 6)
    stack = ("method=random", "ratio=0.75", "compressor=snapkv")
    assert cost(*ten, *stack) == by_hand(*[36] * 6)


def test_samples_are_the_limit_or_what_the_split_has() -> None:
    model = ("model=llava15_7b", "method=none")
    spec = settled(*model, "benchmark=gqa")
    assert cost_of(spec, method_of(spec.method)).samples == 12578
    spec = settled(*model, "benchmark=gqa", "limit=100")
    assert cost_of(spec, method_of(spec.method)).samples == 100


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("model=llava_ov_7b", "benchmark=mvbench"), "benchmark mvbench: lengths of its videos"),
        (("model=lavida_llada_8b", "benchmark=gqa"), "model lavida_llada_8b: steps"),
        (("method=parallelvlm", "benchmark=seedling_caption"), "method parallelvlm: rounds"),
    ],
)
def test_what_is_not_known_offline_is_named(argv: tuple[str, ...], said: str) -> None:
    with pytest.raises(UnknownCost, match=said):
        cost(*argv, *(() if "method=parallelvlm" in argv else ("method=none",)))


def test_models_that_are_not_here_are_estimated_by_their_facts() -> None:
    cells, lines = planned(
        *("-m", "model=llava_ov_72b,llava15_7b", "method=none,fitprune,fastv", "ratio=0.95"),
        *(
            "budget=average",
            "benchmark=gqa,mvbench",
            "cluster=slurm",
            "refused=skip",
            "cluster.cells_per_job=2",
        ),
    )
    assert {cell.status for cell in cells} == {"to do", "refused"}
    text = "\n".join(lines)
    assert (
        "missing on this machine: model.hub='llava-hf/llava-1.5-7b-hf' is not in the local" in text
    )
    assert "cannot run, and is left out: " in text
    assert "not counted, unknown offline: benchmark mvbench: lengths of its videos" in text
    assert "not counted, unknown offline: method fitprune: " in text
    jobs = jobs_of(cells, cluster_of(composed("cluster=slurm", "cluster.cells_per_job=2").cells))
    assert (jobs[0].model, len(jobs[0].cells)) == ("llava_ov_72b", 2)
    assert any("llava_ov_72b, 2 cells; 4 GPUs" in line for line in lines)
    counted = [cell.cost.flops for cell in cells if cell.cost is not None and cell.would_run]
    hours = sum(
        cell.cost.flops * cell.cell.resources.gpus / 2e13 / 3600
        for cell in cells
        if cell.cost is not None and cell.would_run
    )
    assert (
        f"estimate: {sum(counted) / 1e18:.3g} EFLOPs, {hours:.3g} GPU-hours (decoding not counted)"
        in text
    )
    assert "2e+13 FLOP/s of a GPU over its whole job (cluster.flops_per_second)" in text


def hours_of(lines: list[str]) -> str:
    return next(line for line in lines if line.startswith("estimate: "))


def test_hours_never_stand_without_decoding() -> None:
    unstated = ("-m", "model=llava15_7b", "method=none,fastv", "benchmark=gqa", "ratio=0.5")
    _, lines = planned(*unstated)
    assert all("GPU-hours (decoding not counted)" in line for line in lines if "GPU-hours" in line)
    assert "(decoding not counted)" in hours_of(lines)
    arguments = ("-m", "model=llava15_7b", "method=none", "benchmark=gqa,latency")
    assert "(decoding not counted in 1 of 2 cells)" in hours_of(planned(*arguments)[1])


def test_answers_of_a_stated_length_are_counted_as_the_longest() -> None:
    pages = ("model=deepseek_ocr_tiny", "method=rtprune", "ratio=0.25", "benchmark=omnidocbench")
    cells, lines = planned(*pages, "++benchmark.generation.max_new_tokens=500")
    assert "GPU-hours (answers as long as they may be)" in hours_of(lines)
    assert "takes 0.02 s at least" in " ".join(" ".join(lines).split())
    cost = cells[0].cost
    assert cost is not None
    # 1,355 pages in batches of 8.
    assert cost.decoding == pytest.approx(170 * 500 * 0.02)
    assert cost.longest


def test_steps_of_denoised_answers_are_counted_where_they_are_stated() -> None:
    lavida = ("model=lavida_llada_8b", "benchmark=gqa", "limit=1", "budget=kept")
    stated = (
        "++benchmark.generation.max_new_tokens=16",
        "++benchmark.generation.steps=8",
    )
    spec = settled(*lavida, *stated, "method=none")
    facts = spec.model.facts
    entering = (facts.visual_tokens,) * facts.text.layers
    step = text_flops(facts, entering, NOMINAL_TEXT + 16) + head_flops(facts, 16)
    assert cost(*lavida, *stated, "method=none") == 8 * step
    fewer = cost(*lavida, *stated, "method=d3tom", "ratio=0.9")
    assert step < fewer < 8 * step
    cells, lines = planned(*lavida, *stated, "method=d3tom", "ratio=0.9")
    assert "not counted" not in hours_of(lines)
    assert cells[0].cost is not None
    with pytest.raises(UnknownCost, match=r"benchmark\.generation\.max_new_tokens"):
        cost(*lavida, stated[1], "method=none")


def test_lengths_that_are_exact_count_as_they_are() -> None:
    argv = ("model=llava15_7b", "method=none", "benchmark=latency", "engine.batch_size=4")
    spec = settled(*argv)
    cost = cost_of(spec, method_of(spec.method))
    assert not cost.longest
    assert 12e9 < decoder_bytes(spec.model) < 14e9
    assert cost.decoding == pytest.approx(512 * 0.02)
    wide = settled(*argv, "model.dtype=float32")
    cost = cost_of(wide, method_of(wide.method))
    assert cost.decoding == pytest.approx(512 * decoder_bytes(wide.model) / 1e12)


def test_the_store_is_asked_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    grid = ("-m", "method=none,random,uniform", "ratio=0.5,0.9")
    bench = make_bench(store, capsys, monkeypatch)
    done = bench(*grid, "--dry")
    assert done.code == 0, done.err
    assert not store.exists()
    assert bench.fake.specs == []
    # `none` at two ratios is one run.
    assert f"runs in {store}: 5 to do" in done.out
    assert bench("method=random", "ratio=0.5").code == 0
    key = next(store.glob("runs/*/row.json")).parent.name
    assert bench("method=random", "ratio=0.9").code == 0
    (other,) = {path.parent.name for path in store.glob("runs/*/row.json")} - {key}
    (store / "runs" / other / "row.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    done = bench(*grid, "--dry")
    assert f"runs in {store}: 1 done, 1 begun, 3 to do" in done.out
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before
    forced = bench(*grid, "--dry", "force=true")
    assert f"runs in {store}: 5 to do" in forced.out
    assert json.loads((store / "runs" / key / "row.json").read_bytes())["status"] == "done"
