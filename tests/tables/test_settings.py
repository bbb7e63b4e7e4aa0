"""Tables compare whatever a preset sets: each override, prompt sets with all that they fill in, and what files say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.errors import UserError
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.reports.tables.cell_runs import CellRun, run_of_cell
from espalier.harness.reports.tables.cell_settings import compared_settings, row_settings
from espalier.harness.reports.tables.published_tables import FIRST, papers, read_cells, read_paper
from espalier.harness.reports.tables.table_presets import preset, titles
from espalier.harness.runs.run_settings import Contents, settings_of
from espalier.harness.specs.catalogue import build_method
from tests.tables.stored import commit, write_paper
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


def all_runs() -> Iterator[CellRun]:
    for slug in papers():
        paper = read_paper(slug)
        for number in paper.tables:
            for cell in read_cells(paper, number):
                run = run_of_cell(paper, cell)
                if isinstance(run, CellRun):
                    yield run


@cache
def examples() -> Mapping[str, CellRun]:
    """Return runs that cover all keys of each paper, all models and all benchmarks, by their command lines."""
    found, covered = {}, set()
    for run in all_runs():
        of_run = {
            (run.overrides["model"], *run.overrides),
            ("benchmark", run.overrides["benchmark"]),
        }
        if not of_run <= covered:
            found[" ".join(run.line)] = run
            covered |= of_run
    return found


def row_of(line: tuple[str, ...]) -> dict[str, Any]:
    """Return what the row of a command line says of its settings, as run.py would store it."""
    command = read_command(line)
    assert command is not None
    spec = build_spec(command.cells[0])
    method = build_method(spec.method.name, spec.method.params)
    spec = kind_of(method, spec).normalise(spec, method)
    settings = settings_of(spec, method, Contents("model", "draft"))
    return row_settings(json.loads(json.dumps(settings)))


def test_presets_set_nothing_that_is_not_compared() -> None:
    """What stands outside of the grids is in no row: which cells run, and what is timed beside them."""
    keys = set()
    for name in titles():
        section = preset(name)
        assert section.keys() <= {"refused", "engine", "hydra", "grids"}
        assert section.get("engine", {}).keys() <= {"paired"}
        keys |= {key for grid in section["grids"] for key in grid if key not in OF_A_CELL}
    assert keys == OTHER.keys()
    assert keys == {key for run in all_runs() for key in run.overrides if key not in OF_A_CELL}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("key", OTHER)
def test_a_row_with_another_value_of_an_override_is_another_runs(key: str) -> None:
    run = next(one for one in all_runs() if key in one.overrides)
    asked, value = compared_settings(run), OTHER[key]
    assert asked.difference(asked.values) == ""
    if isinstance(value, Mapping):
        value = value[run.overrides[key]]
    assert value != run.overrides[key]
    setting = {"method.draft": "draft.name"}.get(key, key)
    if setting not in asked.values:
        setting = ".".join(setting.lstrip("+").split(".")[:2])
    # Values of hyper-parameters need not be valid: they stand in a row as they are.
    told = {setting: value}
    if not key.startswith("method.params."):
        told = row_of(CellRun({**run.overrides, key: value}, "", 1.0).line)
        assert asked.difference(told)
    others = {name: value for name, value in asked.values.items() if name != setting}
    assert asked.difference({**others, setting: told.get(setting)}).startswith(f"{setting}=")
    assert asked.difference(others), "a row that does not say it is taken for one that does"


@pytest.mark.sampled(16)
@pytest.mark.parametrize("line", examples())
def test_the_row_that_a_run_makes_is_its_own(line: str) -> None:
    run = examples()[line]
    assert compared_settings(run).difference(row_of(run.line)) == ""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("override", UNSET)
def test_a_row_that_sets_what_no_preset_does_is_another_runs(override: str) -> None:
    run = next(
        one
        for one in all_runs()
        if (one.overrides["model"], one.overrides["benchmark"]) == ("qwen2_5_vl_7b", "textvqa_ocr")
        and one.overrides["method"] == "fastv"
    )
    assert compared_settings(run).difference(row_of((*run.line, "model.weights=trained"))) == ""
    assert compared_settings(run).difference(row_of((*run.line, override)))


def test_what_costs_time_alone_makes_no_difference_where_it_is_not_set() -> None:
    run = next(one for one in all_runs() if one.overrides["method"] == "fastv")
    others = ("engine.batch_size=1", "engine.rescore=true", "engine.warmup=3", "seed=5")
    assert compared_settings(run).difference(row_of((*run.line, *others))) == ""


def test_settings_of_a_draft_count() -> None:
    run = next(one for one in all_runs() if one.overrides["method"] == "parallelvlm")
    for option in ("weights=random", "+processor.size=20", "prompt=original"):
        line = (*run.line, f"+method.draft_options.{option.lstrip('+')}")
        assert compared_settings(run).difference(row_of(line)).startswith("draft."), option


def test_a_row_of_other_settings_fills_no_cell_and_is_named(tmp_path: Path) -> None:
    store = tmp_path / "store"
    commit(store, "random", 0.804)
    row = json.loads((store / "runs" / "random" / "row.json").read_text())
    settings = {**row["settings"], "model": {"weights": "random"}}
    commit(store, "random2", 0.804, settings=settings)
    commit(
        store,
        "asked",
        0.9,
        settings={**row["settings"], "benchmark": {"limit": None, "text": "Where?"}},
    )
    (store / "runs" / "random" / "row.json").unlink()
    table, _ = rebuilt(tmp_path / "papers", store)
    assert table.filled[0].value is None
    (note,) = [one for one in table.notes if "other settings" in one]
    assert "random2 model.weights=random, not trained" in note
    assert "asked benchmark.text=Where?, not None" in note


def test_an_override_that_rows_do_not_tell_is_refused(tmp_path: Path) -> None:
    folder = write_paper(tmp_path)
    path = folder / "toy.yaml"
    for key in ("limit", "log.name", "compressor.ratio", "modell.prompt"):
        text = path.read_text().replace("Fast: {method: fastv", f"Fast: {{method: fastv, {key}: 1")
        broken = folder / "other.yaml"
        broken.write_text(text)
        with pytest.raises(UserError, match=f"key='{key}' is unknown"):
            read_paper("other", folder)
