"""Cost estimates: the same count as a row for the same tokens, and named reasons for cells without an estimate."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.cell_settings import read_settings
from espalier.harness.config.compose import Command, read_command
from espalier.harness.config.group_lists import choices
from espalier.harness.cost.budget import NOMINAL_TEXT
from espalier.harness.cost.flops import head_flops, layer_flops, text_flops
from espalier.harness.errors import UserError
from espalier.harness.kinds.checkpoint_check import decoder_bytes
from espalier.harness.kinds.lookup import kind_of, method_of
from espalier.harness.runs.cluster import dry_run
from espalier.harness.runs.cluster.cluster_sweep import cells_of
from espalier.harness.runs.cluster.dry_run import (
    CAUSES,
    TO_RUN,
    CellCost,
    Decoding,
    DecodingSide,
    PlannedCell,
    UnknownCost,
    answer_lengths,
    cost_of,
    estimate_of,
    job_gpus,
    jobs_of,
    lines_of,
    plan,
)
from espalier.harness.runs.cluster.resources import GpuKind, Span, cluster_of, gpu_kinds, reached
from espalier.harness.runs.runner import Runner
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.digests import Digests
from tests.runs.helpers import make_bench


@cache
def composed(*argv: str) -> Command:
    return read_command(argv)


def settled(*argv: str) -> RunSpec:
    spec = build_spec(composed(*argv).cells[0])
    method = method_of(spec.method)
    return kind_of(method, spec).normalise(spec, method)


def cost_at(*argv: str) -> CellCost:
    spec = settled(*argv)
    return cost_of(spec, method_of(spec.method))


def decoding_of(*argv: str) -> Decoding:
    """Return the decoding of a cell that has one."""
    return cost_at(*argv).decoding


def cost(*argv: str) -> int:
    return cost_at(*argv).flops


def planned(*argv: str) -> tuple[list[PlannedCell], list[str]]:
    command = composed(*argv)
    cluster = cluster_of(command.cells)
    settings = [read_settings(cell) for cell in command.cells]
    planned = cells_of(command, settings, cluster)
    cells = [plan(cell, Digests(), Runner(), cluster) for cell in planned]
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
    assert cost(*ten, "method=random", "ratio=0.75", "compressor=snapkv") == by_hand(*[36] * 6)


def test_samples_are_the_limit_or_what_the_split_has() -> None:
    model = ("model=llava15_7b", "method=none")
    assert cost_at(*model, "benchmark=gqa").samples == 12578
    assert cost_at(*model, "benchmark=gqa", "limit=100").samples == 100


def test_what_is_not_known_offline_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "frame_tokens", dict)
    with pytest.raises(UnknownCost, match="model llava_ov_7b: tokens of a video's frame"):
        cost("model=llava_ov_7b", "benchmark=mvbench", "method=none")


def test_a_video_counts_its_frames() -> None:
    video = ("model=llava_ov_7b", "benchmark=mvbench", "method=fastv", "ratio=0.9", "limit=10")
    cell = cost_at(*video, "model.video.frames=16")
    facts = settled(*video).model.facts
    # 14 x 14 tokens of each frame, which goes through the tower by itself: 27 x 27 patches.
    assert cell.visual == 16 * 196
    tower = 10 * 16 * facts.tower.layers * layer_flops(facts.tower, 729, causal=False)
    assert tower < cell.tower < 1.3 * tower
    entering = [16 * 196] * 2 + [314] * 26
    assert cell.flops == 10 * (text_flops(facts, entering, NOMINAL_TEXT) + head_flops(facts))


def test_rounds_of_a_draft_take_the_time_of_both_sides() -> None:
    decoder = ("model=llava_ov_72b", "benchmark=mvbench_describe", "limit=4", "ratio=0.9")
    in_turn = decoding_of(*decoder, "method=vanilla_sd", "engine.compare=false")
    gpu, no_place = gpu_kinds()["A100"], {}
    tokens = in_turn.tokens.at(0)
    step = in_turn.target.seconds(gpu, no_place, tokens)
    drafted = in_turn.rounds.draft.seconds(gpu, no_place, tokens)
    share = reached().acceptance.at(0)
    window = in_turn.rounds.window
    accepted = sum(share**place for place in range(window + 1))
    by_hand = 4 * tokens * (step + window * drafted) / accepted
    assert in_turn.seconds(gpu, no_place) == pytest.approx(by_hand)
    # Each answer is decoded a second time, without the draft.
    compared = decoding_of(*decoder, "method=vanilla_sd")
    assert compared.seconds(gpu, no_place) == pytest.approx(by_hand + 4 * tokens * step)
    at_once = decoding_of(*decoder, "method=parallelvlm", "engine.compare=false")
    assert 0.5 * by_hand < at_once.seconds(gpu, no_place) < by_hand
    assert at_once.rounds.draft.prompt < in_turn.rounds.draft.prompt


def test_a_batch_waits_for_its_longest_answer() -> None:
    pages = ("model=deepseek_ocr_base", "method=none", "benchmark=omnidocbench", "limit=8")
    together, alone = (decoding_of(*pages, f"engine.batch_size={rows}") for rows in (8, 1))
    # Of eight lengths between none and twice the mean.
    assert (together.longest, alone.longest) == (16 / 9, 1)
    side = DecodingSide(0, 0, 0, together.target.stack)
    gpu, no_place = gpu_kinds()["A100"], {}
    assert Decoding(Span(9, 9), 2, 1.5, side).seconds(gpu, no_place) == pytest.approx(
        2 * 1.5 * 9 * side.seconds(gpu, no_place, 9)
    )


def test_causes_of_an_estimate_add_up_in_squares() -> None:
    assert set(CAUSES) == {*(reached().__annotations__.keys() - {"expert_launch"}), "answers"}

    def total(places: Mapping[str, float]) -> float:
        return 10 * 2 ** (3 * places.get("reads", 0)) * 2 ** (-4 * places.get("launch", 0))

    estimate = estimate_of(total)
    assert estimate.span == pytest.approx((10 / 2**5, 10 * 2**5))
    assert estimate.cause == CAUSES["launch"]


PRESETS = ("d2pruner_table1", "rtprune_table2", "aircache_table1", "parallelvlm_table1")


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_estimates_of_presets_are_at_most_three_times_wide(preset: str) -> None:
    lines = planned("-m", f"+experiment={preset}")[1]
    assert not any("lengths of its videos" in line or "rounds" in line for line in lines)
    totals = [line for line in lines if "most of the span" in line]
    assert len(totals) == len(gpu_kinds())
    for line in hours_of(lines):
        low, high = re.search(r"([\d.,]+) to ([\d.,]+) GPU-hours", line).groups()
        # Both ends are printed with two digits.
        assert float(high.replace(",", "")) <= 3.1 * float(low.replace(",", ""))


@pytest.mark.slow
def test_a_benchmark_that_takes_most_of_the_time_is_named() -> None:
    text = " ".join(planned("-m", "+experiment=d2pruner_table1")[1])
    text = " ".join(text.split())
    assert "time by benchmark: vqav2 8" in text
    assert "vqav2: Papers print test-dev" in text
    others = "gqa,mmbench_en,mmbench_cn,mme,pope,scienceqa_img,textvqa_ocr,vizwiz"
    assert f"Without it: benchmark={others}" in text


def test_idle_gpus_of_this_machine_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "devices", lambda: tuple("01234567"))
    line = ("-m", "model=llava15_7b", "method=none,fastv", "ratio=0.5", "benchmark=gqa,pope,mme")
    assert (
        "this machine has 8 GPUs: cluster=joblib cluster.cells_per_job=1 runs 6 jobs at once"
        in planned(*line)[1]
    )
    assert not any("this machine has" in text for text in planned(*line, "cluster=joblib")[1])


@pytest.mark.slow
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
    for line in (
        "missing on this machine: model.hub='llava-hf/llava-1.5-7b-hf' is not in the local",
        "cannot run, and is left out: ",
        "not counted, unknown offline: method fitprune: ",
    ):
        assert line in text
    jobs = jobs_of(cells, cluster_of(composed("cluster=slurm", "cluster.cells_per_job=2").cells))
    assert (jobs[0].model, len(jobs[0].cells)) == ("llava_ov_72b", 2)
    assert any("llava_ov_72b, 2 cells; 4 GPUs" in line for line in lines)
    counted = [cell.cost for cell in cells if cell.cost is not None and cell.status in TO_RUN]
    assert f"estimate: {sum(cost.flops for cost in counted) / 1e18:.3g} EFLOPs of the" in text
    for name, gpu in gpu_kinds().items():
        # 145 GB of weights: 3 of 80 GB by the resources of the model's file, more of 24 GB.
        gpus = {job.model: job_gpus(job, gpu) for job in jobs}
        assert gpus == {"llava_ov_72b": 8 if name == "RTX 4090" else 4, "llava15_7b": 1}
        assert f"  {name}: " in text
    # Answers to gqa are short.
    assert "decoding not counted" not in text


def hours_of(lines: list[str]) -> list[str]:
    return [line for line in lines if "GPU-hours" in line]


@pytest.mark.slow
def test_hours_never_stand_without_decoding() -> None:
    unstated = ("-m", "model=llava15_7b", "method=none,fastv", "benchmark=mmmu", "ratio=0.5")
    cells, lines = planned(*unstated)
    assert [cell.cost and cell.cost.answer_tokens for cell in cells] == [Span(0, 0)] * 2
    assert len(hours_of(lines)) == 1 + len(gpu_kinds())
    assert all(" (decoding not counted)" in line for line in hours_of(lines))
    named = (
        "benchmark mmmu: length of its answers (cluster.answer_tokens={mmmu: <tokens>}) (2 cells)"
    )
    assert f"not counted, unknown offline: {named}" in lines
    arguments = ("-m", "model=llava15_7b", "method=none", "benchmark=gqa,mmmu")
    assert "(decoding not counted in 1 of 2 cells)" in hours_of(planned(*arguments)[1])[-1]
    stated = planned(*unstated, "cluster.answer_tokens={mmmu: 300}")
    assert "not counted" not in "".join(hours_of(stated[1]))
    tokens = [cell.cost.answer_tokens for cell in stated[0] if cell.cost is not None]
    assert tokens == [Span(270000, 270000)] * 2


def test_pages_cost_hours_by_the_length_of_their_text() -> None:
    (cell,), lines = planned("model=deepseek_ocr_base", "method=none", "benchmark=omnidocbench")
    assert "1,355 of" not in "".join(lines)
    cost, decoding = cell.cost, cell.cost and cell.cost.decoding
    assert decoding.tokens == (600, 1300)
    # 1,355 pages in batches of 8; a step of 12 layers takes no less than their launches.
    assert decoding.batches == 170
    launch, (few, many) = reached().expert_launch, decoding.tokens
    shortest, longest = (dict.fromkeys(CAUSES, place) for place in (-1, 1))
    low, high = (cost.seconds(gpu_kinds()["H100"], places) for places in (shortest, longest))
    waits = 16 / 9
    assert low > waits * 170 * few * 12 * launch.low > 600
    assert high < 1.5 * waits * 170 * many * 12 * launch.high
    # A GPU that is ten times slower in everything reads its bytes.
    slow = cost.seconds(GpuKind(1e12, 1e10, 2**36), shortest)
    assert slow > waits * 170 * few * decoding.target.weights / 1e10


def test_a_limit_of_new_tokens_cuts_the_typical_length() -> None:
    pages = ("model=deepseek_ocr_base", "method=none", "benchmark=omnidocbench")
    unstated = ("model=llava15_7b", "benchmark=mmmu")
    for line, limit, tokens in (
        (pages, 8192, (600, 1300)),
        (pages, 1000, (600, 1000)),
        (pages, 100, (100, 100)),
        (unstated, 50, (1, 50)),
    ):
        assert decoding_of(*line, f"++benchmark.generation.max_new_tokens={limit}").tokens == tokens


def test_lengths_are_of_benchmarks_that_exist_and_each_has_its_source() -> None:
    names = [name for length in answer_lengths() for name in length["benchmarks"]]
    assert set(names) <= set(choices("benchmark"))
    assert len(names) == len(set(names))
    for length in answer_lengths():
        assert length["tokens"] == sorted(length["tokens"])
        assert len(length["source"]) > 10


def test_a_gpu_of_the_users_stands_beside_those_of_the_file() -> None:
    line = ("model=llava15_7b", "method=none", "benchmark=gqa")
    l40s = "cluster.gpu_kinds={L40S: {flops: 3.62e14, bandwidth: 8.64e11, memory: 48GiB}}"
    _, lines = planned(*line, l40s)
    assert sum(text.startswith("  L40S: ") for text in lines) == 1
    with pytest.raises(UserError, match=r"cluster\.gpu_kinds\.L40S\.flops=0"):
        cluster_of(composed(*line, l40s.replace("3.62e14", "0")).cells)


@pytest.mark.parametrize(
    ("model", "views", "tokens", "projector"),
    [
        ("llava15_7b", 1, 577, 576 * (1024 * 4096 + 4096 * 4096)),
        ("gemma3_12b", 1, 4096, 256 * 1152 * 3840),
        # A key and a value of each pooled patch, its score and its share of the average; then the maps of a token.
        (
            *("molmo2_4b", 5, 729),
            2900 * 2 * 1152 * (2304 + 1) + 725 * (1152 * (2304 + 1152) + 9728 * (2 * 1152 + 2560)),
        ),
    ],
)
def test_a_picture_goes_through_the_tower(
    model: str, views: int, tokens: int, projector: int
) -> None:
    line = (f"model={model}", "method=none", "benchmark=gqa", "limit=10")
    tower = settled(*line).model.facts.tower
    layers = views * tower.layers * layer_flops(tower, tokens, causal=False)
    assert cost_at(*line).tower == 10 * (layers + 2 * projector)


def test_steps_of_denoised_answers_are_counted() -> None:
    lavida = ("model=lavida_llada_8b", "benchmark=gqa", "limit=1", "budget=kept")
    stated = (
        "++benchmark.generation.max_new_tokens=16",
        "++benchmark.generation.steps=8",
    )
    facts = settled(*lavida, *stated, "method=none").model.facts
    entering = (facts.visual_tokens,) * facts.text.layers
    step = text_flops(facts, entering, NOMINAL_TEXT + 16)
    # Two places a step: the head runs for those that are masked.
    head = sum(head_flops(facts, masked) for masked in range(16, 0, -2))
    assert cost(*lavida, *stated, "method=none") == 8 * step + head
    assert step < cost(*lavida, *stated, "method=d3tom", "ratio=0.9") < 8 * step
    cells, lines = planned(*lavida, *stated, "method=d3tom", "ratio=0.9")
    assert "not counted" not in "".join(hours_of(lines))
    assert cells[0].cost.forwards == 8
    cached = cost(*lavida, *stated, "method=none", "+model.generation.prefix_cache=true")
    prompt = text_flops(facts, entering, NOMINAL_TEXT)
    assert prompt < cached < prompt + 8 * step / 4
    # The prompt set states sixteen places, a word a step.
    assert cost(*lavida, "method=none") > cost(*lavida, *stated, "method=none")


def test_lengths_that_are_exact_count_as_they_are() -> None:
    argv = ("model=llava15_7b", "method=none", "benchmark=latency", "engine.batch_size=4")
    decoding = decoding_of(*argv)
    assert (decoding.tokens, decoding.batches) == ((512, 512), 1)
    target = decoding.target
    assert 12e9 < target.weights < 14e9
    assert target.weights == decoder_bytes(settled(*argv).model)
    # Four prompts of 2,048 tokens: half a MiB of 16-bit keys and values each.
    assert target.prompt == 4 * 2048 * 2**19
    assert decoding.longest == 1


@pytest.mark.slow
def test_the_store_is_asked_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    grid = ("-m", "method=none,random,uniform", "ratio=0.5,0.9")
    bench = make_bench(store, capsys, monkeypatch)
    done = bench.success(*grid, "--dry")
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
    assert f"runs in {store}: 5 to do" in bench(*grid, "--dry", "force=true").out
    assert json.loads((store / "runs" / key / "row.json").read_bytes())["status"] == "done"
