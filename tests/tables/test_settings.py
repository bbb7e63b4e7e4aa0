"""Tables compare whatever a preset sets: each override, prompt sets with all that they fill in, and what files say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.kinds.lookup import kind_of
from espalier.harness.reports.tables.cell_runs import CellRun, preset, run_of_cell, titles
from espalier.harness.reports.tables.cell_settings import (
    ComparedSettings,
    compared_settings,
    row_settings,
)
from espalier.harness.reports.tables.published_tables import FIRST, read_cells, read_paper
from espalier.harness.runs.run_key import key_parts, run_key
from espalier.harness.runs.run_settings import Contents, settings_of
from espalier.harness.settings import OMITTED, marked
from espalier.harness.specs.benchmark_spec import Answers, DatasetSpec, Derived
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.comparable import policy, settings
from espalier.harness.specs.row_settings import LEFT_OPEN, SECTIONS
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.digests import Digests
from tests import commands
from tests.tables.stored import all_runs, commit
from tests.tables.test_rebuilt import rebuilt

#: Overrides by which rows are looked up.
OF_A_CELL = (*FIRST, "method.variant")

#: Every override that presets set beside those that name a row's cell, each with another value that a run may have.
OTHER: Mapping[str, Any] = {
    "model.prompt": "original",
    "model.attention": "sdpa",
    "model.video.frames": 16,
    "+model.generation.prefix_cache": False,
    "++benchmark.generation.max_new_tokens": 24,
    "++benchmark.generation.steps": 12,
    "benchmark.prompt_tokens": 1024,
    "benchmark.new_tokens": 32,
    "engine.batch_size": 2,
    "engine.rescore": False,
    "method.draft": {"llava_ov_0_5b": "llava_ov_7b", "llava_ov_7b": "llava_ov_0_5b", "qwen2_5_vl_7b": "qwen2_5_vl_3b"},
    "method.params.K": 6,
    "method.params.L": 8,
    "method.params.alpha": 0.51,
    "method.params.allocation": "gaps",
    "method.params.gamma": 4,
    "method.params.guidance": "random",
    "method.params.merged": 0.3,
    "method.params.ratio": 0.51,
    "method.params.size": 8,
    "method.params.tau": 0.7,
    "method.params.text_only": False,
    "method.params.typical": 0.9,
    "method.params.window": "elsewhere",
    "method.params.z": 0.3,
}  # fmt: skip

#: Overrides by which a row says of a model or a benchmark what no preset sets.
UNSET = (
    "model.weights=random",
    "model.video.frames=8",
    "model.prompt=lmms_eval",
    "model.conversation=checkpoint",
    "+model.processor.max_pixels=401408",
    "+model.generation.top_p=0.5",
    "++benchmark.generation.max_new_tokens=7",
    "benchmark.text='{{ question }}'",
    "engine.backend=emulate",
    "engine.decode=generate",
)


@cache
def examples() -> Mapping[str, CellRun]:
    """Return runs that cover all keys of each paper, all models and all benchmarks, by their command lines."""
    chosen, covered = {}, set()
    for _, run in all_runs():
        of_run = {
            (run.overrides["model"], *run.overrides),
            ("benchmark", run.overrides["benchmark"]),
        }
        if not of_run <= covered:
            chosen[" ".join(run.line)] = run
            covered |= of_run
    return chosen


def spec_of(line: tuple[str, ...]) -> RunSpec:
    return commands.spec_of(*line)


def stored_settings(spec: RunSpec, **contents: Any) -> dict[str, Any]:
    """Return the settings of a run's row, as run.py would store them."""
    method = build_method(spec.method.name, spec.method.params)
    spec = kind_of(method, spec).normalise(spec, method)
    stored = settings_of(spec, method, Contents("model", "draft", **contents))
    return dict(json.loads(json.dumps(stored)))


def row_of(line: tuple[str, ...]) -> dict[str, Any]:
    return row_settings(stored_settings(spec_of(line)))


def test_presets_set_nothing_that_is_not_compared() -> None:
    """What stands outside of the grids is in no row: which cells run, and what is timed beside them."""
    keys = set()
    for name in titles():
        section = preset(name)
        assert section.keys() <= {"refused", "engine", "hydra", "grids"}
        assert section.get("engine", {}).keys() <= {"paired"}
        keys |= {key for grid in section["grids"] for key in grid if key not in OF_A_CELL}
    assert keys == OTHER.keys()
    assert keys == {key for _, run in all_runs() for key in run.overrides if key not in OF_A_CELL}


@pytest.mark.sampled(24)
@pytest.mark.parametrize("key", OTHER)
def test_a_row_with_another_value_of_an_override_is_another_runs(key: str) -> None:
    run = next(run for _, run in all_runs() if key in run.overrides)
    cell, value = compared_settings(run), OTHER[key]
    assert cell.difference(cell.values) == ""
    if isinstance(value, Mapping):
        value = value[run.overrides[key]]
    assert value != run.overrides[key]
    setting = {"method.draft": "draft.name"}.get(key, key)
    if setting not in cell.values:
        setting = ".".join(setting.lstrip("+").split(".")[:2])
    # Values of hyper-parameters need not be valid: they stand in a row as they are.
    row = {setting: value}
    if not key.startswith("method.params."):
        row = row_of(CellRun({**run.overrides, key: value}, "", 1.0).line)
        assert cell.difference(row)
    others = {name: value for name, value in cell.values.items() if name != setting}
    assert cell.difference({**others, setting: row.get(setting)}).startswith(f"{setting}=")
    assert cell.difference(others), "a row that does not say it is taken for one that does"


@pytest.mark.sampled(96)
@pytest.mark.parametrize("line", examples())
def test_the_row_that_a_run_makes_is_its_own(line: str) -> None:
    run = examples()[line]
    assert compared_settings(run).difference(row_of(run.line)) == ""


@pytest.mark.sampled(12)
@pytest.mark.parametrize("override", UNSET)
def test_a_row_that_sets_what_no_preset_does_is_another_runs(override: str) -> None:
    run = next(
        run
        for _, run in all_runs()
        if (run.overrides["model"], run.overrides["benchmark"]) == ("qwen2_5_vl_7b", "textvqa_ocr")
        and run.overrides["method"] == "fastv"
    )
    assert compared_settings(run).difference(row_of((*run.line, "model.weights=trained"))) == ""
    assert compared_settings(run).difference(row_of((*run.line, override)))


def test_what_costs_time_alone_makes_no_difference_where_it_is_not_set() -> None:
    run = next(run for _, run in all_runs() if run.overrides["method"] == "fastv")
    others = ("engine.batch_size=1", "engine.rescore=true", "engine.warmup=3", "seed=5")
    assert compared_settings(run).difference(row_of((*run.line, *others))) == ""


@cache
def seedling() -> CellRun:
    """Return the run of a published cell on the embedded model."""
    paper = read_paper("d2pruner")
    cells = (cell for number in paper.tables for cell in read_cells(paper, number))
    runs = (run_of_cell(paper, cell, "seedling") for cell in cells)
    return next(
        run
        for run in runs
        if isinstance(run, CellRun)
        and (run.overrides["method"], run.overrides["benchmark"]) == ("divprune", "seedling_vqa")
    )


#: What a row states where a run has another setting than its cell, by override.
UNLIKE = {
    "engine.scope=item": "engine.scope=item, not prompt",
    "engine.decode=generate": "engine.decode=generate, not loop",
    "engine.separators=candidates": "engine.separators=candidates, not keep",
    "model.transparency=white": "model.transparency=white, not drop",
    "model.media=required": "model.media=required, not optional",
    "model.template=qwen": "model.template=qwen, not default",
    "model.conversation=llava_v1": "model.conversation=llava_v1, not checkpoint",
    "model.join=lines": "model.join=lines, not None",
    "benchmark.cluster=scene": "benchmark.cluster={'column': 'scene', 'modulo': None}, not None",
    "benchmark.blocks=0": "benchmark.intervals={'blocks': 0}, not None",
    "benchmark.task=seedling_ocr": "benchmark.task=seedling_ocr, not seedling_vqa",
}


@pytest.mark.sampled
@pytest.mark.parametrize("override", UNLIKE)
def test_a_row_of_a_setting_that_its_cell_does_not_set_is_another_runs(override: str) -> None:
    cell = compared_settings(seedling())
    assert cell.difference(row_of(seedling().line)) == ""
    assert cell.difference(row_of((*seedling().line, override))) == UNLIKE[override]


@pytest.mark.parametrize(
    ("contents", "difference"),
    [
        ({"data": "abc"}, "benchmark.data=abc, not None"),
        ({"quantisation": "awq 4-bit"}, "model.quantisation=awq 4-bit, not None"),
    ],
)
def test_a_row_of_other_files_is_another_runs(contents: dict[str, Any], difference: str) -> None:
    stored = stored_settings(spec_of(seedling().line), **contents)
    assert compared_settings(seedling()).difference(row_settings(stored)) == difference


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset": DatasetSpec("other", revision="abc")},
        {"answers": Answers("letters")},
        {"derived": {"total": Derived("sum", ("accuracy",))}},
    ],
)
def test_a_row_of_another_benchmark_under_its_name_is_another_runs(changes: dict[str, Any]) -> None:
    spec = spec_of(seedling().line)
    changed = replace(spec, benchmark=replace(spec.benchmark, **changes))
    difference = compared_settings(seedling()).difference(row_settings(stored_settings(changed)))
    assert difference.startswith(f"benchmark.{next(iter(changes))}=")


def test_a_row_of_another_engine_and_one_with_an_unknown_block_are_other_runs() -> None:
    cell, stored = compared_settings(seedling()), stored_settings(spec_of(seedling().line))
    served = row_settings({**stored, "backend": {"server": True, "name": "vllm"}})
    assert cell.difference(served) == "backend.name=vllm, not transformers"
    unknown = row_settings({**stored, "weather": {"rain": True}})
    assert cell.difference(unknown) == "weather.rain=True, not None"


def test_a_row_of_another_repository_or_commit_is_another_runs() -> None:
    run = next(run for _, run in all_runs() if run.overrides["model"] == "llava15_7b")
    cell, row = compared_settings(run), row_of(run.line)
    released = str(cell.values["model.revision"])
    hub, _, commit = released.partition("@")
    for revision, same in (
        (released, True),
        ("0123abcd", True),  # a folder's digest names no commit
        (f"{hub}@main", True),
        (f"{hub}@{commit[::-1]}", False),
        (f"somebody/else@{commit}", False),
        ("somebody/else@main", False),
    ):
        assert (cell.difference({**row, "model.revision": revision}) == "") is same, revision


@pytest.mark.parametrize("part", SECTIONS)
def test_every_declared_setting_is_compared_or_left_open(part: str) -> None:
    run = next(run for _, run in all_runs() if run.overrides["method"] == "parallelvlm")
    cell = compared_settings(run)
    for name in {field.name for field in fields(SECTIONS[part])}.difference(
        marked(SECTIONS[part], OMITTED)
    ):
        key = f"{part}.{name}"
        row = {**cell.values, key: "other"}
        if name == "revision":
            row[key] = "some@other"
        free = key not in cell.stated and key in LEFT_OPEN
        assert cell.difference(row).startswith(f"{key}=") is not free, key
        if free:
            sets_it = ComparedSettings({**cell.values, key: "set"}, cell.stated | {key})
            assert sets_it.difference(row).startswith(f"{key}="), key


@pytest.mark.parametrize("part", ["model", "benchmark", "engine"])
def test_a_new_field_of_a_spec_is_stored_keyed_compared_and_shown(part: str) -> None:
    """A field that nobody listed anywhere counts where it is off its default, and changes no row where it is not."""
    spec = spec_of(seedling().line)
    method = build_method(spec.method.name, spec.method.params)
    section = getattr(spec, part)
    extended = make_dataclass("Extended", [("novel", int, 0)], bases=(type(section),), frozen=True)
    usual, unusual = (
        replace(spec, **{part: extended(**vars(section), novel=value)}) for value in (0, 3)
    )
    assert stored_settings(usual) == stored_settings(spec)
    row = {"settings": stored_settings(unusual)}
    assert row["settings"][part]["novel"] == 3
    keys = [run_key(key_parts(variant, method, Digests())) for variant in (spec, usual, unusual)]
    assert keys[0] == keys[1] != keys[2]
    assert compared_settings(seedling()).difference(row_settings(row["settings"])) == (
        f"{part}.novel=3, not None"
    )
    assert settings(row)[f"{part}.novel"] == 3
    assert ("novel=3" in policy(row)) is (part == "engine")


def test_a_row_of_an_earlier_version_has_the_defaults_of_newer_settings() -> None:
    cell, row = compared_settings(seedling()), row_of(seedling().line)
    stated = {"model.weights", "benchmark.limit", "engine.decode"}
    older = {key: row[key] for key in row if key in stated or key.startswith("method.")}
    assert cell.difference(older) == ""
    strict = compared_settings(
        CellRun({**seedling().overrides, "benchmark.cluster": "scene"}, "", 1.0)
    )
    assert strict.difference(row).startswith("benchmark.cluster=None, not {")


def test_settings_of_a_draft_count() -> None:
    run = next(run for _, run in all_runs() if run.overrides["method"] == "parallelvlm")
    for option in ("weights=random", "+processor.size=20", "prompt=original"):
        line = (*run.line, f"+method.draft_options.{option.lstrip('+')}")
        assert compared_settings(run).difference(row_of(line)).startswith("draft."), option


def test_a_row_of_other_settings_fills_no_cell_and_is_named(tmp_path: Path) -> None:
    store = tmp_path / "store"
    commit(store, "random", 0.804)
    row = json.loads((store / "runs" / "random" / "row.json").read_text())
    commit(store, "random2", 0.804, settings={**row["settings"], "model": {"weights": "random"}})
    commit(
        store,
        "asked",
        0.9,
        settings={**row["settings"], "benchmark": {"limit": None, "text": "Where?"}},
    )
    (store / "runs" / "random" / "row.json").unlink()
    table, _ = rebuilt(tmp_path / "papers", store)
    assert table.filled[0].value is None
    (note,) = [line for line in table.notes if "other settings" in line]
    assert "random2 model.weights=random, not trained" in note
    assert "asked benchmark.text=Where?, not None" in note
