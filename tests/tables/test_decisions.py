"""What stands in two files about one paper: pages, prompt sets, presets and formulas agree with its tables."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest
from omegaconf import OmegaConf

from espalier.harness.config.group_lists import choices, read_choice
from espalier.harness.config.model_section import apply_prompt_set
from espalier.harness.paths import CONF, ROOT
from espalier.harness.reports.tables.cell_runs import CellRun, method_of
from espalier.harness.reports.tables.published_tables import (
    papers,
    read_cells,
    read_paper,
)
from lab.analytic import d2pruner_formulas as analytic_d2pruner
from lab.analytic import d3tom_formulas as analytic_d3tom
from lab.analytic import rtprune_formulas as analytic_rtprune
from tests.tables.stored import all_runs, runs

#: Families as docs/prompts.md calls them, by the names of their models in conf/model.
FAMILIES = {
    "LLaVA-1.5": r"llava15_.+",
    "LLaVA-NeXT": r"llava_next_.+",
    "InternVL2": r"internvl2_\d+b",
    "InternVL2.5": r"internvl2_5_.+",
    "Qwen2-VL": r"qwen2_vl_.+",
    "Qwen2.5-VL": r"qwen2_5_vl_.+",
    "OneVision": r"llava_ov_(?!1_5).+",
    "LLaVA-Video": r"llava_video_.+",
    "DeepSeek-OCR": r"deepseek_ocr_.+",
    "LaViDa": r"lavida_.+",
    "LLaDA-V": r"llada_v_.+",
}


def prompt_rows() -> list[tuple[str, list[str], list[str], str]]:
    """Return paper, families, sets and the description of each line of the page's table of papers."""
    text = (ROOT / "docs" / "prompts.md").read_text(encoding="utf-8")
    table = text.split("## Which set reproduces which paper")[1].strip().split("\n\n")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return [(a, b.split(", "), re.findall(r"`(\w+)`", c), d) for a, b, c, d in lines]


def prompt_of(run: CellRun) -> str:
    return str(run.overrides.get("model.prompt", "original"))


@pytest.mark.parametrize("slug", papers())
def test_presets_run_the_prompt_sets_of_the_page(slug: str) -> None:
    name = read_paper(slug).paper
    rows = [row for row in prompt_rows() if row[0] == name]
    for model, prompt in {(run.overrides["model"], prompt_of(run)) for _, run in runs(slug)}:
        sets = [
            row[2]
            for row in rows
            if any(re.fullmatch(FAMILIES[family], model) for family in row[1])
        ]
        assert len(sets) == 1, (model, sets)
        assert prompt in sets[0], (model, prompt, sets)


def test_the_page_names_papers_families_and_sets_that_there_are() -> None:
    assert {row[0] for row in prompt_rows()} == {read_paper(slug).paper for slug in papers()}
    for _, families, sets, _ in prompt_rows():
        for family in families:
            models = [name for name in choices("model") if re.fullmatch(FAMILIES[family], name)]
            assert models, family
            for model in models:
                known = {"original", *read_choice("model", model)["prompts"]}
                assert set(sets) <= known, (model, sets)


def test_frames_of_the_page_are_those_of_the_set_and_of_the_presets() -> None:
    """The page gives ParallelVLM's frames; set, presets and the paper's file have them too."""
    (row,) = [line for line in prompt_rows() if line[0] == "ParallelVLM"]
    (frames,) = re.findall(r"(\d+) frames", row[3])
    stated = {
        run.overrides["model.video.frames"] for _, run in runs("parallelvlm") if is_video(run)
    }
    assert {str(count) for count in stated} == {frames}
    for model in {run.overrides["model"] for _, run in runs("parallelvlm")}:
        assert video_of(model, "hub")["frames"] == int(frames)
    assert OmegaConf.load(CONF / "experiment" / "parallelvlm.yaml").model.video.frames == int(
        frames
    )


def is_video(run: CellRun) -> bool:
    return bool(read_choice("benchmark", run.overrides["benchmark"])["dataset"].get("video"))


def video_of(model: str, prompt: str) -> Mapping[str, Any]:
    settings, _ = apply_prompt_set({**read_choice("model", model), "prompt": prompt})
    return {**settings["video"], **{f"processor.{k}": v for k, v in settings["processor"].items()}}


def test_cells_whose_count_of_video_tokens_cannot_be_the_papers_say_so() -> None:
    """The paper gives its target 196 x 128 tokens; Qwen2.5-VL merges 28 x 28 pixels of two frames into one."""
    paper_tokens = 196 * 128
    for cell, run in runs("parallelvlm"):
        model = run.overrides["model"]
        if model.startswith("llava_ov"):
            # 27 x 27 patches of a frame are pooled to 14 x 14.
            assert "video tokens" not in run.mismatch
            continue
        video = video_of(model, prompt_of(run))
        most = video["frames"] // 2 * video["processor.video_max_pixels"] // 28**2
        assert most < paper_tokens
        assert f"at most {most:,} video tokens" in run.mismatch, cell
        assert f"the paper keeps {paper_tokens:,}" in run.mismatch, cell


@pytest.mark.parametrize("path", sorted((CONF / "base" / "prompts").glob("*.yaml")), ids=str)
def test_a_set_that_names_a_paper_is_the_one_that_its_presets_run(path: Any) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    named = [re.match(r"  (\w+): .*#(.*)", line) for line in lines]
    models = [
        name
        for name in choices("model")
        if f"/base/prompts/{path.stem}@" in (CONF / "model" / f"{name}.yaml").read_text()
    ]
    for match in filter(None, named):
        for slug in ("aircache", "parallelvlm"):
            if read_paper(slug).paper in match[2]:
                used = {prompt_of(run) for _, run in runs(slug) if run.overrides["model"] in models}
                assert used <= {match[1]}


def test_unpruned_anchors_are_cells_of_the_tables_and_run_their_prompts() -> None:
    with (CONF / "anchors.csv").open(encoding="utf-8", newline="") as file:
        anchors = list(csv.DictReader(file))
    for anchor in anchors:
        cells = [
            (cell, run)
            for cell, run in all_runs()
            if (cell.paper, cell.table) == (anchor["paper"], anchor["table"])
            and run.overrides["method"] == "none"
            and run.overrides["model"] == anchor["model"]
            and run.overrides["benchmark"] == anchor["benchmark"]
        ]
        assert cells, anchor
        for cell, run in cells:
            assert float(anchor["published"]) == cell.number, anchor
            assert anchor["prompt"] == prompt_of(run), anchor
            assert run.number_path == f"metrics.{anchor['metric']}.value", anchor


def test_benchmarks_name_the_papers_whose_tables_ask_for_them() -> None:
    used = defaultdict(set)
    for slug in papers():
        for _, run in runs(slug):
            used[run.overrides["benchmark"]].add(slug)
    for name in choices("benchmark"):
        assert used[name] <= set(read_choice("benchmark", name)["papers"]), name


def test_splits_are_those_that_d3tom_names() -> None:
    """Appendix A.2; the split of GQA that it names is not here, and its cells say so."""
    splits = {"mmmu": "validation", "mmbench_en": "dev", "ai2d": "test", "mathvision": "test"}
    for name, split in splits.items():
        assert read_choice("benchmark", name)["dataset"]["split"] == split
    benchmarks = {run.overrides["benchmark"] for _, run in runs("d3tom")}
    assert benchmarks == {*splits, "scienceqa_img", "llava_bench", "gqa"}
    assert all("GQA_lite" in run.mismatch for cell, run in runs("d3tom") if cell.benchmark == "GQA")
    assert "GQA_lite" in read_choice("benchmark", "gqa")["note"]


def test_lengths_of_answers_of_d3tom_are_those_of_its_table_4() -> None:
    printed = {cell.benchmark: int(cell.value) for cell in read_cells(read_paper("d3tom"), "4")}
    preset = OmegaConf.load(CONF / "experiment" / "d3tom.yaml").benchmark.generation
    lengths, steps = (
        {name: int(count) for name, count in re.findall(r"(\w+): (\d+)", str(text))}
        for text in OmegaConf.to_container(preset, resolve=False).values()
    )
    for cell, run in runs("d3tom"):
        name, length = run.overrides["benchmark"], printed[cell.benchmark]
        assert run.overrides["++benchmark.generation.max_new_tokens"] == length == lengths[name]
        assert run.overrides["++benchmark.generation.steps"] == length // 2 == steps[name]
    note = read_choice("benchmark", "llava_bench")["note"]
    assert f"max_new_tokens={printed['LLaVA-Bench']}" in note


def test_layers_and_steps_of_formulas_are_those_of_the_runs() -> None:
    """A formula that reproduces a printed count, and the run beside it, prune at the same place."""
    layers = defaultdict(set)
    for cell, run in all_runs():
        if (cell.paper, cell.table) in {("D2Pruner", "4"), ("RTPrune", "4"), ("D3ToM", "2")}:
            layers[cell.method].add(method_of(run)[2].get("K"))
    assert layers["D2Pruner"] == {analytic_d2pruner.K}
    assert layers["FastV"] == {analytic_rtprune.UNPRUNED_LAYERS["FastV"], analytic_d3tom.K}
    assert layers["D3ToM"] == layers["D3ToM-t"] == {analytic_d3tom.K}
    for cell, run in runs("d3tom"):
        if cell.table == "2":
            assert run.overrides["++benchmark.generation.steps"] == analytic_d3tom.PAPER.steps


#: What names of budgets and methods state, as patterns, and the override that each is: of the number in the name.
STATED: dict[str, tuple[tuple[str, str, Any], ...]] = {
    "D2Pruner": (
        ("budget", r"([\d.]+)% (?:visual )?tokens", ("ratio", lambda n: 1 - n / 100)),
    ),
    "D3ToM": (
        ("budget", r"([\d.]+)% tokens", ("ratio", lambda n: 1 - n / 100)),
        ("method", r"D3ToM \(merge layer index (\d+), fitted\)", ("method.params.K", float)),
    ),
    "AirCache": (
        ("budget", r"([\d.]+)% visual (?:tokens/)?KV", ("ratio", lambda n: 1 - n / 100)),
        ("method", r"AirCache \(alpha=([\d.]+)\)", ("method.params.alpha", float)),
        ("method", r".+ merge proportion (\d+)% of dropped KV", ("method.params.merged", lambda n: n / 100)),
        ("method", r".+ window \((\d+)\)", ("method.params.size", float)),
        ("split", r"batch \d+, prompt (\d+)k", ("benchmark.prompt_tokens", lambda n: 1024 * n)),
        ("split", r"batch (\d+), prompt \d+k", ("engine.batch_size", float)),
        ("benchmark", r"latency \((\d+) output tokens\)", ("benchmark.new_tokens", float)),
    ),
    "ParallelVLM": (
        ("budget", r"(?:gamma=\d+, )?alpha=([\d.]+)", ("ratio", float)),
        ("budget", r"gamma=(\d+), .+", ("method.params.gamma", float)),
        ("budget", r"L=(\d+)", ("method.params.L", float)),
        ("budget", r"sequence length (\d+)K", ("benchmark.prompt_tokens", lambda n: 1024 * n)),
        ("budget", r"(\d+)% visual tokens", ("ratio", lambda n: 1 - n / 100)),
    ),
    "RTPrune": (
        ("budget", r"fixed r=([\d.]+)", ("ratio", float)),
        ("budget", r"ratio ([\d.]+), \d+ tokens", ("ratio", float)),
        ("method", r"RTPrune \(tau=([\d.]+)\)", ("method.params.tau", float)),
        ("method", r"RTPrune \(z=([\d.]+)\)", ("method.params.z", float)),
        ("method", r"RTPrune \(alpha=([\d.]+)\)", ("method.params.alpha", float)),
        # Behind layer n, counted from 0, stands before layer n + 1, whose site FastV calls K = n + 1.
        ("method", r"attention pruning at layer (\d+)", ("method.params.K", lambda n: n + 1)),
    ),
}  # fmt: skip


def test_names_of_budgets_and_methods_state_what_runs() -> None:
    met = set()
    for cell, run in all_runs():
        if run.overrides["method"] == "none" and cell.method != "":
            assert run.overrides["ratio"] == 0
            if cell.benchmark != "forward time" and not cell.benchmark.startswith("latency"):
                continue
        for column, pattern, (key, value_of) in STATED[cell.paper]:
            match = re.fullmatch(pattern, getattr(cell, column))
            if match and not (key == "ratio" and run.overrides["method"] in ("none", "onsd")):
                met.add((cell.paper, pattern))
                stated = run.overrides.get(key)
                assert stated == pytest.approx(value_of(float(match[1])), abs=1.1e-3), (cell, key)
    assert met == {(name, pattern[1]) for name, patterns in STATED.items() for pattern in patterns}


#: Visual tokens of a page by mode of DeepSeek-OCR, and of a picture of LLaVA.
WHOLE_COUNTS = {
    **{"DeepSeek-OCR-Tiny": 64, "DeepSeek-OCR-Small": 100},
    **{"DeepSeek-OCR-Base": 256, "DeepSeek-OCR-Large": 400},
    **{"LLaVA-1.5-7B": 576, "LLaVA-Next-7B": 2880},
}


def test_counts_in_the_names_of_budgets_are_the_shares_that_run() -> None:
    """`75% (192 tokens)`, `dynamic, avg=214 tokens`: of the mode's count, and `typical` of the dynamic ratio too."""
    counted = 0
    for cell, run in all_runs():
        match = re.search(r"(\d+)(?: visual)? tokens", cell.budget)
        whole = WHOLE_COUNTS.get(cell.model)
        if not match or not whole or "% " in cell.budget.replace("75% (", ""):
            continue
        counted += 1
        left = int(match[1]) / whole
        assert run.overrides["ratio"] == pytest.approx(1 - left, abs=1e-6), cell
        if "method.params.typical" in run.overrides:
            assert run.overrides["method.params.typical"] == pytest.approx(left, abs=1e-9), cell
    assert counted > 900


def test_published_shares_of_the_dynamic_ratio_are_those_of_its_file() -> None:
    text = (CONF / "method" / "rtprune.yaml").read_text(encoding="utf-8")
    comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    listed = {int(a) / int(b) for a, b in re.findall(r"(\d+)/(\d+)", comment)}
    used = {
        run.overrides.get("method.params.typical")
        for cell, run in runs("rtprune")
        if cell.budget != "dynamic r"
    } - {None}
    # Table 10 has 216 of 256 under another threshold, beside the 214 of the default.
    assert sorted(used - {216 / 256}) == pytest.approx(sorted(listed))


def test_shares_of_single_benchmarks_are_the_mean_ratios_that_table_6_prints() -> None:
    printed = {
        (cell.benchmark, cell.split): cell.number
        for cell in read_cells(read_paper("rtprune"), "6")
        if cell.metric == "mean pruning ratio"
    }
    compared = 0
    for cell, run in runs("rtprune"):
        if (cell.table, cell.budget, cell.method) == ("6", "dynamic r", "RTPrune"):
            compared += 1
            kept = 1 - printed[cell.benchmark, cell.split]
            assert run.overrides["method.params.typical"] == pytest.approx(kept)
            assert run.overrides["ratio"] == pytest.approx(1 - kept)
        elif cell.table == "6":
            assert "method.params.typical" not in run.overrides
    assert compared == 5


def test_the_judge_of_a_paper_is_one_in_both_pages() -> None:
    page = (ROOT / "docs" / "judges.md").read_text(encoding="utf-8")
    note = read_choice("benchmark", "mmbench_video")["note"]
    (judge,) = re.findall(r"AirCache's judge is ([\w.-]+\w)", note)
    assert f"AirCache's is {judge}" in page
    unnamed = "does not name its judge"
    assert unnamed in page
    assert unnamed in read_choice("benchmark", "llava_bench")["note"]
    assert any(
        "LLaVA-Bench's judge" in decision for decision in read_paper("d3tom").tables["1"].decisions
    )
