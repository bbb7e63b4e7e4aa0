"""The GPU's benchmark, as far as a processor can run it: every part end to end, the refusal, the page, what fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from espalier.harness.cost import bounds as measured
from espalier.harness.decoding.speculative.drafts import EMPTY_DRAFT
from lab.bench import gpu_bench as bench_gpu
from lab.bench import gpu_parts as bench_gpu_parts
from lab.bench import speculative_bench as bench_sd
from lab.bench import step_bandwidth as bench_bandwidth
from lab.bench.bench_setup import Figure, Setup
from lab.bench.gpu_decode import cached_bytes, filled, places
from lab.bench.gpu_setup import SMALL, Found, GpuPlan, Note
from lab.bench.selection_times import Question

Capture = pytest.CaptureFixture[str]


def last_line(capsys: Capture) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put other parts in the place of the real ones."""

    def put(**parts: Callable[[GpuPlan], Found]) -> None:
        monkeypatch.setattr(bench_gpu, "parts", lambda: parts)

    return put


@pytest.mark.exhaustive
def test_every_part_runs_to_its_end(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_sd, "WARMING", 1)
    assert bench_gpu.main(["--device", "cpu", "--write", str(tmp_path)]) == 0
    result = last_line(capsys)
    assert json.loads((tmp_path / "bench_gpu.json").read_text()) == result
    parts = result["parts"]
    assert [(name, part["notes"]) for name, part in parts.items()] == [
        ("engine", []),
        ("select", []),
        ("decoding", []),
    ]
    figures = {figure["name"]: figure for part in parts.values() for figure in part["figures"]}
    page = (tmp_path / "bench_gpu.md").read_text()
    assert [name for name in figures if name not in page] == []
    assert f"torch {torch.__version__}" in page
    assert result["conditions"]["device_name"] in page

    assert {figure["part"] for figure in parts["engine"]["figures"]} == {
        *("prefill", "machinery", "memory", "decode")
    }
    token = figures["one token, full"]["value"]
    (least,) = (bound["value"] for name, bound in figures.items() if "allows, full" in name)
    assert figures["bandwidth reached, full"]["value"] == pytest.approx(100 * least / token)

    selections = [figure["name"].partition(":")[0] for figure in parts["select"]["figures"]]
    assert selections == [
        "the product itself, N=36 d=96",
        "divprune, N=36 d=96 keep=4",
        "fastv_official, N=36 d=96 keep=4",
        "random_layer2, N=36 d=96 keep=4",
        "the product itself, N=64 d=96",
        "divprune, N=64 d=96 keep=7",
        "fastv_official, N=64 d=96 keep=7",
    ]

    pair = "captions, parallelvlm ratio=0.5, both on cpu"
    alike = figures[f"answers unlike plain ones, {pair}"]
    assert (alike["value"], alike["verdict"]) == (0, "met")
    assert figures[f"answers given up, {pair}"]["verdict"] == "met"
    t_p, t_q = (figures[f"{name}, {pair}"]["value"] for name in ("T_p", "T_q"))
    assert figures[f"c, {pair}"]["value"] == pytest.approx(t_p / t_q)
    for seen in (60, 30):
        steps = f"60 visual tokens, {seen} for the draft, both on cpu"
        target = figures[f"T_p beside the draft, {steps}"]["value"]
        drafted = figures[f"T_q beside the target, {steps}"]["value"]
        assert figures[f"c beside one another, {steps}"]["value"] == pytest.approx(target / drafted)
        assert f"c alone, {steps}" in figures


def test_without_a_gpu_it_says_so_in_one_line_and_builds_nothing(
    monkeypatch: pytest.MonkeyPatch, stand_ins: Callable[..., None], capsys: Capture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    built: list[GpuPlan] = []

    def engine(plan: GpuPlan) -> Found:
        built.append(plan)
        yield Note("built")

    stand_ins(engine=engine)
    assert bench_gpu.main([]) == 2
    out, err = capsys.readouterr()
    assert (out, built) == ("", [])
    assert err == "error: bench-gpu needs a CUDA device; torch sees none on this machine\n"
    assert bench_gpu.main(["--only", "engin"]) == 2
    assert capsys.readouterr().err.startswith("error: --only='engin'")


def test_the_second_gpu_is_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert places(bench_gpu.plan_for("cuda")) == {"both on cuda:0": ("cuda:0", "threads")}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert places(bench_gpu.plan_for("cuda")) == {
        "both on cuda:0": ("cuda:0", "threads"),
        "draft on cuda:1": ("cuda:1", "processes"),
    }


@pytest.mark.slow
def test_a_part_that_fails_is_a_line_and_the_others_go_on(
    stand_ins: Callable[..., None], tmp_path: Path, capsys: Capture
) -> None:
    def engine(plan: GpuPlan) -> Found:
        yield Figure("decode", "one token", 3.0, "ms")
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 16 GiB")

    written: list[list[str]] = []

    def select(plan: GpuPlan) -> Found:
        written.append(list(json.loads((tmp_path / "bench_gpu.json").read_text())["parts"]))
        yield Figure("selection", "the product itself", 5.0, "ms")

    stand_ins(engine=engine, select=select)
    assert bench_gpu.main(["--device", "cpu", "--write", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert written == [["engine"]]  # what is finished is kept, whatever comes
    line = "engine: OutOfMemoryError: CUDA out of memory. Tried to allocate 16 GiB"
    assert f"Failed: {line}" in out.splitlines()
    page = (tmp_path / "bench_gpu.md").read_text().splitlines()
    assert f"- Failed: {line}" in page
    assert "| decode | one token | 3 ms |  |  |" in page
    assert "| selection | the product itself | 5 ms |  |  |" in page
    assert bench_gpu.main(["--device", "cpu", "--only", "select", "--write", str(tmp_path)]) == 0


def test_selections_too_long_or_too_large_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def questions(specs: Any, tokens: torch.Tensor, keep: int) -> list[Question]:
        ((name, _),) = specs

        def ask() -> torch.Tensor:
            if name == "large":
                raise torch.OutOfMemoryError("full")
            if name == "broken":
                raise RuntimeError("two devices")
            return tokens[0, :keep]

        return [Question(name, name, keep, ask)]

    monkeypatch.setattr(bench_gpu_parts, "questions", questions)
    specs: Any = [(name, None) for name in ("slow", "large", "broken", "fast")]
    before = {"slow": 101.0, "fast": 99.0}
    plan = replace(SMALL, longest=10.0)
    parts = list(bench_gpu_parts.at_size(specs, (360, 8, 9, 2), plan, before, 36))
    assert [part for part in parts if isinstance(part, Note)] == [
        Note("slow was not asked at N=360: expected to take 10 s"),
        Note("large does not fit the memory at N=360"),
        Note("broken at N=360: RuntimeError: two devices", failed=True),
    ]
    names = [part.name.partition(",")[0] for part in parts if isinstance(part, Figure)]
    assert names == ["the product itself", "fast"]
    assert before["fast"] < 99


# ------------------------------------------------------------------ bandwidth and filled caches


def test_a_step_reads_the_decoder_and_the_head_and_of_a_table_only_what_is_the_head() -> None:
    table, head = nn.Embedding(100, 4), nn.Linear(4, 100, bias=False)
    decoder = nn.ModuleDict({"table": table, "layer": nn.Linear(4, 4, bias=False)})

    def adapter(output: nn.Module) -> Any:
        model = SimpleNamespace(
            get_input_embeddings=lambda: table, get_output_embeddings=lambda: output
        )
        return SimpleNamespace(model=model, decoder=decoder)

    assert measured.step_bytes(adapter(head)) == 4 * (16 + 400)
    head.weight = table.weight
    assert measured.step_bytes(adapter(head)) == 4 * (16 + 400)
    half: Any = adapter(nn.Linear(4, 100, bias=False).bfloat16())
    assert measured.step_bytes(half) == 4 * 16 + 2 * 400


def test_a_step_is_held_against_its_bytes() -> None:
    step, least, reached = bench_bandwidth.against_bandwidth(
        "p", "full", [4.0, 2.0, 9.0], 10**9, 1e12
    )
    assert (step.value, step.quartiles, step.unit) == (4, (3, 6.5), "ms")
    assert (least.value, least.unit) == (1, "ms")
    assert (reached.value, reached.unit) == (25, "%")


def test_a_filled_side_steps_behind_its_prompt() -> None:
    setup = Setup("seedling_draft")
    side = filled(setup.adapter, 40)
    assert len(side.rows([5], EMPTY_DRAFT)) == 1
    assert side.prompt_lengths == (40,) * setup.adapter.facts.text.layers
    assert side.stack.following.item() == 40
    text = setup.adapter.facts.text
    assert cached_bytes(side) == 41 * text.layers * 2 * text.kv_heads * text.head_dim * 4
