"""Benchmark files agree with the tasks that they name, any other task runs without one, and mistakes come together."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import run
from espalier.harness.config.benchmark_section import benchmark_spec
from espalier.harness.config.build_spec import specs_of
from espalier.harness.config.compose import read_command
from espalier.harness.config.composer import compose_section
from espalier.harness.config.group_lists import asked_groups, choices, comment, read_choice
from espalier.harness.config.group_table import CONTROLS, listing
from espalier.harness.config.lmms_task_files import leaves
from espalier.harness.paths import ROOT
from espalier.harness.settings import setting_hints
from espalier.harness.specs.benchmark_spec import BenchmarkSpec, Derived
from tests import commands
from tests.refused import refused

NAMES = choices("benchmark")

#: What the tables of the five papers print -> the file of each, by what D2Pruner's, D3ToM's and AirCache's rows need
#: that lmms-eval has under the papers' scorer. Those of video, captions, boxes, documents and judges have tests of
#: their own.
PRINTED = {
    "GQA": ("gqa",),
    "MMB, MMBench, MMBench-EN": ("mmbench_en",),
    "MME": ("mme",),
    "POPE": ("pope",),
    "SQA": ("scienceqa_img",),
    "VQAv2": ("vqav2",),
    "TextVQA": ("textvqa", "textvqa_ocr"),
    "VizWiz": ("vizwiz",),
    "AI2D": ("ai2d",),
    "ChartQA, ChatQA": ("chartqa",),
    "DocVQA": ("docvqa",),
    "InfoVQA": ("infovqa",),
    "MMStar": ("mmstar",),
    "OKVQA": ("okvqa",),
    "MMMU": ("mmmu",),
    "MathVision": ("mathvision", "mathvision_testmini"),
    "MMB-CN": ("mmbench_cn",),
    "Flickr30k": ("flickr30k",),
    "NoCaps": ("nocaps",),
    "RefCOCO": ("refcoco", "refcoco_val", "refcoco_testA", "refcoco_testB"),
    "RefCOCO+": ("refcoco_plus_val", "refcoco_plus_testA", "refcoco_plus_testB"),
    "RefCOCOg": ("refcocog_val", "refcocog_test"),
    "LLaVA-Bench": ("llava_bench",),
    "MMBench-Video": ("mmbench_video",),
    "OmniDocBench v1.5": ("omnidocbench",),
    "olmOCR-Bench": ("olmocr_bench",),
    "Ocean-OCR": tuple(
        f"ocean_ocr_{part}"
        for part in ("document_en", "document_zh", "handwriting_en", "handwriting_zh", "scene_text")
    ),
}

#: Benchmarks whose videos the speculative tables describe, with no score of theirs.
DESCRIBED = {
    "VideoDetailCaption": "video_detail_caption",
    "VideoMME": "videomme_describe",
    "MVBench": "mvbench_describe",
    "MVLU": "mlvu_describe",
    "LongVideoBench": "longvideobench_describe",
}


@cache
def spec_of(*argv: str) -> BenchmarkSpec:
    return commands.spec_of(*argv).benchmark


@pytest.mark.parametrize("printed", PRINTED)
def test_every_benchmark_of_the_papers_has_a_file_with_the_printed_headline(printed: str) -> None:
    for name in PRINTED[printed]:
        spec = benchmark_spec(read_choice("benchmark", name))
        assert spec.papers
        assert spec.reported[spec.headline].scale in (1, 100)
        assert spec.dataset.samples is not None


@pytest.mark.parametrize("name", DESCRIBED.values())
def test_every_described_data_set_has_a_file(name: str) -> None:
    assert benchmark_spec(read_choice("benchmark", name)).kind == "description"


@pytest.mark.parametrize("name", NAMES)
def test_a_file_agrees_with_the_task_of_lmms_eval(name: str) -> None:
    spec = benchmark_spec(read_choice("benchmark", name))
    if spec.include_path is not None:
        return
    tasks = leaves(spec.task)
    several = len(tasks) > 1
    metrics = {
        f"{leaf.name}/{metric}" if several else metric for leaf in tasks for metric in leaf.metrics
    }
    if spec.answers is not None:
        metrics |= {f"{metric}_lmms_eval" for metric in metrics} | {"unparsed"}
        assert spec.metrics[-1] == "unparsed"
    assert set(spec.metrics) <= metrics | set(spec.derived)
    assert {leaf.settings["dataset_path"] for leaf in tasks} == {spec.dataset.path}
    if not several:
        (leaf,) = tasks
        assert leaf.settings.get("dataset_name") == spec.dataset.config
        assert leaf.settings["test_split"] == spec.dataset.split


def test_mme_is_the_sum_of_its_two_parts() -> None:
    spec = spec_of("benchmark=mme")
    parts = ("mme_perception_score", "mme_cognition_score")
    assert spec.derived == {
        "mme_total": Derived("sum", parts),
        "mme_total_lmms_eval": Derived("sum", tuple(f"{part}_lmms_eval" for part in parts)),
    }
    assert spec.headline == "mme_total"


def test_textvqa_with_and_without_ocr_are_two_benchmarks_of_one_task() -> None:
    plain, hinted = spec_of("benchmark=textvqa"), spec_of("benchmark=textvqa_ocr")
    assert (plain.task, plain.dataset) == (hinted.task, hinted.dataset)
    assert (plain.prompt, hinted.prompt) == ({}, {"ocr": True})


def test_any_task_of_lmms_eval_is_a_benchmark() -> None:
    spec = spec_of("benchmark=task:vstar_bench")
    assert (spec.name, spec.task) == ("task:vstar_bench", "vstar_bench")
    assert spec.metrics == (spec.headline,) == ("vstar_overall_acc",)
    assert spec.include_path is None
    assert spec_of("benchmark=task:ok_vqa_val2014").metrics == ("exact_match",)
    assert compose_section("benchmark", "task:pope")["task"] == "pope"
    assert (spec.dataset.path, spec.dataset.split) == ("lmms-lab-encoder/vstar-bench", "test")


def test_a_group_has_the_mean_of_its_tasks_and_the_metrics_of_each() -> None:
    spec = spec_of("benchmark=task:mvbench")
    assert spec.headline == spec.metrics[0] == "mvbench_accuracy"
    assert spec.derived == {"mvbench_accuracy": Derived("mean", ("*/mvbench_accuracy",))}
    assert spec.metrics[1] == "mvbench_action_sequence/mvbench_accuracy"
    assert len(spec.metrics) == 21
    assert (spec.dataset.config, spec.dataset.revision) == (None, "video")


def test_a_metric_of_which_less_is_better_has_that_direction() -> None:
    assert spec_of("benchmark=task:vstar_bench").higher_is_better
    assert any(leaf.metrics == ("wer",) for leaf in leaves("librispeech_test_clean"))
    assert not spec_of("benchmark=task:librispeech_test_clean").higher_is_better


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (
            "-m benchmark=seedling_rec,task:ai2d ratio=0.5,0.9",
            ["seedling_rec", "seedling_rec", "task:ai2d", "task:ai2d"],
        ),
        ("+experiment=quickstart benchmark=task:pope method=none ratio=0.5", ["task:pope"]),
    ],
)
def test_tasks_are_swept_beside_files_and_replace_those_of_presets(
    line: str, names: list[str]
) -> None:
    assert [cell["benchmark"]["name"] for cell in commands.cells_of(*line.split())] == names


#: A file with one mistake of each kind.
WRONG = """\
defaults:
  - /base/benchmark@_here_
  - _self_
name: wrong
kind: quiz
metrics: [accuracy]
headline: accurracy
headlin: accuracy
dataset: {pathh: a/b, samples: many}
reported: {f1: {name: F1, scale: 0}, accuracy: {title: Acc}}
needs: [coffee]
papers: [d3tom]
"""

MISTAKES = (
    "benchmark.headlin is not a config key (did you mean headline?)",
    "config key benchmark.task is missing",
    "benchmark.kind='quiz' is unknown",
    "benchmark.dataset.pathh is not a config key (did you mean path?)",
    "benchmark.dataset.samples='many' must be an integer",
    "benchmark.reported.f1.scale=0 must be a number above 0",
    "benchmark.reported.accuracy.title is not a config key",
    "config key benchmark.reported.accuracy.name is missing",
    "benchmark.needs='coffee' is unknown",
    "benchmark.headline='accurracy' is unknown (did you mean accuracy?)",
    "benchmark.reported='f1' is unknown",
)


def test_all_mistakes_of_a_file_come_in_one_line(conf: Path) -> None:
    (conf / "benchmark" / "wrong.yaml").write_text(WRONG)
    for argv in (["benchmark=wrong"], ["-m", "benchmark=seedling_rec,wrong"]):
        line = refused(specs_of, *argv)
        assert [mistake for mistake in MISTAKES if mistake not in line] == []
        # Nothing else: the last two lines are the valid keys of the two tables with unknown ones.
        assert line.count("; benchmark.") + line.count("; config key") + 1 >= len(MISTAKES)
        assert "papers" not in line.replace("benchmark.papers,", "")


def test_a_file_that_is_no_yaml_names_itself_and_the_line(conf: Path) -> None:
    (conf / "benchmark" / "torn.yaml").write_text("name: torn\nnote: a: b\n")
    error = refused(read_command, ["benchmark=torn"])
    assert re.search("torn.yaml cannot be read .*mapping values.* line 2", error)


def test_every_key_of_the_base_is_read() -> None:
    base = read_choice("base", "benchmark")
    assert set(setting_hints(BenchmarkSpec)) == set(base) | {"name", "task", "metrics", "headline"}


QUICK = """
import sys
import run
codes = [run.main(line.split()) for line in {lines!r}]
slow = [name for name in ("torch", "transformers", "lmms_eval", "datasets") if name in sys.modules]
print(codes, slow)
"""


@pytest.mark.slow
def test_mistakes_and_lists_come_before_torch() -> None:
    lines = ["benchmark=?", "benchmark=task:vstar_bnch", "benchmark=pope benchmark.kind=x"]
    done = subprocess.run(
        [sys.executable, "-c", QUICK.format(lines=lines)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[0, 2, 2] []"
    assert len(done.stderr.splitlines()) == 2


def test_a_question_mark_lists_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["benchmark=?"]) == 0
    head, local, published, hint = capsys.readouterr().out.split("\n\n")
    assert head.split() == ["benchmark", "samples", "kind", "title"]
    assert ["pope", "9,000", "understanding", "POPE"] in [
        line.split() for line in published.splitlines()
    ]
    assert "benchmark=task:NAME" in hint
    # Those without a download come first, and each line says how much there is of what.
    parts = [list(names(part)) for part in (local, published)]
    embedded = [name for name in NAMES if name.startswith("seedling_")]
    assert {"data", "latency", *embedded} <= set(parts[0])
    assert parts[0] == sorted(parts[0])
    assert sorted(parts[0] + parts[1]) == NAMES
    for line in [line for part in (local, published) for line in part.splitlines()[1:]]:
        assert line.startswith(" ") or re.match(r"\w+ +([\d,]+|a batch|yours)  \w+ +\S", line)


def names(part: str) -> Iterator[str]:
    """Yield the first words of the entries below the title of a part of a listing."""
    for line in part.splitlines()[1:]:
        if not line.startswith(" "):
            yield line.split()[0]


@pytest.mark.parametrize("group", ["model", "budget"])
def test_other_groups_are_listed_with_what_they_are(group: str) -> None:
    lines = [line for line in listing(group).splitlines()[1:] if not line.startswith(" ")]
    assert [line.split()[0] for line in lines] == choices(group)
    assert all(len(line.split()) > 1 for line in lines)


@pytest.mark.sampled
@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize(
    "group", ["method", "model", "benchmark", "experiment", "anchor", "engine"]
)
def test_a_listing_is_as_wide_as_the_terminal(
    group: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    narrowest = 27 + 2 + 7 + 2 + 13 + 2 + 24 if group == "benchmark" else 60
    assert max(map(len, listing(group).splitlines())) <= max(columns, narrowest)


def test_methods_are_listed_by_kind_with_their_variants() -> None:
    head, *parts, hint = listing("method").split("\n\n")
    assert head.startswith("method ")
    assert [part.split()[0] for part in parts] == [
        *("Reducers", "Compressors", "Decoders", "Denoisers", "Controls:")
    ]
    listed = [list(names(part)) for part in parts]
    assert all(part == sorted(part) for part in listed)
    assert sorted(name for part in listed for name in part) == choices("method")
    for names_of_kind, name in zip(listed, ("fastv", "snapkv", "pearl", "d3tom"), strict=False):
        assert name in names_of_kind
    assert set(listed[4]) == CONTROLS
    assert re.search(r"^fastv  +FastV .*\[official, paper\]", parts[0], re.S | re.M)
    assert "method.variant=NAME" in hint


@pytest.mark.slow
def test_methods_that_run_on_a_model_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["model=seedling_diffusion", "method=?"]) == 0
    page = capsys.readouterr().out
    marks = dict(re.findall(r"^(\w+) +(yes|no)  ", page, re.M))
    assert list(marks) == re.findall(r"^(?!method)([a-z]\w+)  ", page, re.M)
    assert {marks[name] for name in ("d3tom", "fastv", "none")} == {"yes"}
    assert {marks[name] for name in ("pearl", "snapkv", "autoregressive")} == {"no"}
    assert run.main(["model=nosuch", "method=?"]) == 2
    assert "model='nosuch' is unknown" in capsys.readouterr().err


def test_only_groups_can_be_asked_about() -> None:
    assert asked_groups(["benchmark=?", "ratio=?", "method=fastv", "+experiment=?"]) == (
        "benchmark",
        "experiment",
    )
    assert comment("method", "fastv").startswith("FastV")
