"""The config groups: every file composes into a valid spec, and model facts agree with the shipped checkpoints."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from omegaconf import OmegaConf

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.config.composer import Cell, compose_section
from espalier.harness.config.method_names import setting_names
from espalier.harness.config.resolvers import configs, methods, register
from espalier.harness.errors import UserError
from espalier.harness.kinds.lookup import label_of
from espalier.harness.paths import CONF, ROOT
from espalier.harness.specs.benchmark_spec import Cluster, Derived
from espalier.harness.specs.catalogue import METHODS, build_method, names_of
from espalier.harness.specs.run_spec import POSITIONS, RunSpec
from espalier.methods.base import Decoder, Positions, TokenReducer
from tests import commands

GROUPS = ("model", "method", "benchmark", "budget", "engine", "log", "cluster")
CHOICES = [
    (group, path.stem)
    for group in GROUPS
    for path in sorted((CONF / group).glob("*.yaml"))
    if path.stem != "data"  # has no benchmark without the user's data: tests/runs/test_own_data.py
]


@cache
def cell_of(*argv: str) -> Cell:
    """Compose once what several tests look at."""
    return commands.cells_of(*argv)[0]


def spec_of(*argv: str) -> RunSpec:
    return build_spec(cell_of(*argv))


@pytest.mark.sampled(48)
@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_choice_composes_into_a_spec(group: str, name: str) -> None:
    cell = cell_of(f"{group}={name}")
    assert compose_section(group, name) == cell[group]
    spec = build_spec(cell)
    part = {"budget": spec.budget.rule, "log": spec.log}.get(group)
    if part is not None:
        assert part == name
    elif group in ("model", "benchmark"):
        assert getattr(spec, group).name == name
    elif group == "method":
        assert spec.method.name == name


@pytest.mark.parametrize("change", ["method.variant=paper", "method.params.K=3"])
def test_a_section_alone_follows_overrides(change: str) -> None:
    cell = cell_of("method=fastv", change)
    assert compose_section("method", "fastv", values=[change]) == cell["method"]


def test_content_that_defaults_put_elsewhere_is_where_hydra_puts_it(tmp_path: Path) -> None:
    (tmp_path / "method").mkdir()
    (tmp_path / "fifth.yaml").write_text("K: 5")
    (tmp_path / "method" / "mine.yaml").write_text(
        "defaults: [fastv, /fifth@params, _self_]\nname: fastv\n"
    )
    section = compose_section("method", "mine", folders=[tmp_path])
    assert section == cell_of(f"--config-dir={tmp_path}", "method=mine")["method"]
    assert section["params"]["K"] == 5


def test_choices_are_those_of_the_code() -> None:
    assert set(METHODS.names()) == {name for group, name in CHOICES if group == "method"}
    assert (*get_args(Positions), "method") == POSITIONS
    fast, slow = spec_of("engine=default").engine, spec_of("engine=emulate").engine
    assert (fast.backend, slow) == ("drop", replace(fast, backend="emulate"))
    assert read_command(["--help"]).cells == ()
    command = read_command(["--cfg", "job"])
    assert (command.cells, command.lines, bool(command.text)) == ((), (), True)


#: Sizes of a stack of layers, by their keys in a configuration.
SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
}


@pytest.mark.parametrize("name", ["seedling", "seedling_draft"])
def test_model_facts_are_those_of_the_checkpoint(name: str) -> None:
    model = spec_of(f"model={name}").model
    config: dict[str, Any] = json.loads((model.path / "config.json").read_text())
    text, vision, facts = config["text_config"], config["vision_config"], model.facts
    for field, key in {**SIZES, "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}.items():
        assert getattr(facts.text, field) == text[key], field
    # hidden_states holds the embeddings first: feature layer -2 is the output of the last layer but one.
    used = vision | {
        "num_hidden_layers": vision["num_hidden_layers"] + 1 + config["vision_feature_layer"]
    }
    for field, key in SIZES.items():
        assert getattr(facts.tower, field) == used[key], field
    assert facts.tower.head_dim * facts.tower.heads == vision["hidden_size"]
    assert facts.vocabulary == text["vocab_size"]
    assert facts.class_attention == "token"
    assert facts.projector == (vision["hidden_size"], text["hidden_size"], text["hidden_size"])
    patches = (vision["image_size"] // vision["patch_size"]) ** 2
    assert facts.visual_tokens == patches == config["image_seq_length"]


def test_llava_13b_shares_the_tower_of_7b() -> None:
    small, large = (spec_of(f"model=llava15_{size}").model.facts for size in ("7b", "13b"))
    assert small.tower == large.tower
    assert (small.text.layers, large.text.layers) == (32, 40)
    assert large.text.head_dim * large.text.heads == large.text.hidden


class _Tags(yaml.SafeLoader):
    """Reads lmms-eval's task files without running their functions."""


_Tags.add_multi_constructor("!", lambda loader, suffix, node: suffix)


def task_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the task files below a folder by the names of their tasks, and groups by theirs."""
    contents = (yaml.load(path.read_text(), _Tags) for path in folder.rglob("*.yaml"))
    tasks = [file for file in contents if isinstance(file, dict) and "task" in file]
    return {
        file["task"] if isinstance(file["task"], str) else file["group"]: file for file in tasks
    }


def metrics_of(name: str, files: dict[str, dict[str, Any]], folder: Path) -> set[str]:
    """Return what a task reports; of a group `task/metric` of each of its tasks."""
    task = files[name]
    if not isinstance(task["task"], str):
        return {
            f"{name}/{metric}"
            for name in task["task"]
            for metric in metrics_of(name, files, folder)
        }
    shared = folder.rglob(str(task.get("include", "-")))
    bases = [yaml.load(path.read_text(), _Tags) for path in shared]
    return {entry["metric"] for file in (task, *bases) for entry in file.get("metric_list", ())}


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", [name for group, name in CHOICES if group == "benchmark"])
def test_benchmarks_report_metrics_of_their_task(name: str) -> None:
    benchmark = spec_of(f"benchmark={name}").benchmark
    if benchmark.include_path is None:
        return
    files = task_files(benchmark.include_path)
    listed = metrics_of(benchmark.task, files, benchmark.include_path) | set(benchmark.derived)
    assert set(benchmark.metrics) <= listed
    assert all(source.exists() for source in benchmark.sources)


def test_limit_is_the_benchmarks_unless_given() -> None:
    assert (spec_of().benchmark.limit, spec_of("limit=16").benchmark.limit) == (500, 16)
    assert spec_of("limit=null").benchmark.limit is None


def test_relative_paths_start_where_the_user_stands_and_those_of_the_package_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = spec_of("curves=a/b", "benchmark.path=data", "judge.prompt=../prompt.txt")
    assert (spec.store, spec.curves) == (tmp_path / "results", tmp_path / "a/b")
    assert spec.benchmark.path == tmp_path / "data"
    assert spec.judge.prompt == tmp_path / "../prompt.txt"
    assert spec_of("model.path=weights").model.path == tmp_path / "weights"
    assert spec_of("model.path=pkg://espalier/tasks").model.path == ROOT / "tasks"
    assert spec.model.path.is_relative_to(ROOT)


def test_sweep_expands_into_cells_with_the_model_outermost() -> None:
    command = read_command(
        ["-m", "ratio=0.5,0.9", "method=none,fastv", "model=seedling,seedling_draft"]
    )
    assert command.sweep
    specs = [build_spec(cell) for cell in command.cells]
    cells = [(spec.model.name, spec.budget.ratio, spec.method.name) for spec in specs]
    assert len(set(cells)) == len(cells) == 8
    assert [model for model, _, _ in cells] == ["seedling"] * 4 + ["seedling_draft"] * 4
    assert command.argv[:2] == ("-m", "model=seedling,seedling_draft")


#: Configs of methods that the sweep leaves out, as stated in its file.
NOT_SWEPT = {
    "dycoke_decode",
    "rtprune_dynamic",
    "sparsevlm_official_64",
    "sparsevlm_official_96",
    "sparsevlm_official_128",
}


@pytest.mark.slow
def test_presets_run_every_reducers_config_and_every_decoder_on_every_embedded_benchmark() -> None:
    swept, decoded = swept_by("sweep"), swept_by("speculative")
    reducers = names_of(TokenReducer)  # decoders change no answer
    wanted = {name for name in setting_names() if spec_of(f"method={name}").method.name in reducers}
    assert set(swept["method"]) == wanted - NOT_SWEPT
    assert wanted >= NOT_SWEPT
    assert decoded["method"] == list(names_of(Decoder))
    embedded = {
        name
        for group, name in CHOICES
        if group == "benchmark" and re.search("seedling_(?!video|crowd)", name)
    }
    assert set(swept["benchmark"]) == set(decoded["benchmark"]) == embedded
    assert len(embedded) == 5
    assert swept["ratio"] == ["0.5", "0.75", "0.9"]


def swept_by(preset: str) -> dict[str, list[str]]:
    """The lists of values that a preset sweeps over."""
    register()
    params = OmegaConf.load(CONF / "experiment" / f"{preset}.yaml").hydra.sweeper.params
    lists = {str(key): str(value).split(",") for key, value in params.items()}
    assert all(len(values) == len(set(values)) for values in lists.values())
    return lists


def test_an_unknown_kind_in_a_preset_names_the_valid_ones() -> None:
    for listed in (methods, configs):
        with pytest.raises(
            UserError, match=r"'reducr' .*did you mean reducer\?.*denoiser, reducer"
        ):
            listed("reducr")


def test_the_sweep_leaves_out_what_cannot_run_and_writes_into_the_documentation() -> None:
    command = read_command(
        ["+experiment=sweep", "benchmark=seedling_rec", "method=random,fastv", "ratio=0.9"]
    )
    assert command.sweep
    first, second = (build_spec(cell) for cell in command.cells)
    assert (first.refused, first.report) == ("skip", ROOT / "lab" / "measured" / "sweep")
    assert (first.method.name, second.method.name) == ("random", "fastv")


@pytest.mark.slow
def test_method_configs_differ_in_their_settings() -> None:
    """Rows are told apart by method and settings, and curves by method and label."""
    specs = dict(
        zip(
            setting_names(),
            map(build_spec, commands.cells_of("-m", f"method={','.join(setting_names())}")),
            strict=True,
        )
    )
    methods = {
        (spec.method.name, build_method(spec.method.name, spec.method.params))
        for spec in specs.values()
    }
    assert len(methods) == len(specs)
    labels = {name: (spec.method.name, label_of(spec)) for name, spec in specs.items()}
    assert len(set(labels.values())) == len(labels)


@pytest.mark.slow
def test_quickstart_is_a_sweep_that_the_command_line_narrows() -> None:
    command = read_command(["+experiment=quickstart", "ratio=0.9", "benchmark=seedling_rec"])
    assert command.sweep
    methods = [build_spec(cell).method.name for cell in command.cells]
    assert set(methods) == set(names_of(TokenReducer))


def test_a_benchmark_says_how_its_metrics_are_combined_and_what_is_one_unit() -> None:
    argv = (
        "+benchmark.derived.both={sum:[accuracy,unparsed]}",
        "benchmark.cluster={column:index,modulo:1000}",
        "benchmark.blocks=50",
    )
    benchmark = spec_of(*argv).benchmark
    assert benchmark.derived == {"both": Derived("sum", ("accuracy", "unparsed"))}
    assert (benchmark.cluster, benchmark.blocks) == (Cluster("index", 1000), 50)
    assert spec_of("benchmark.cluster=scene").benchmark.cluster == Cluster("scene")
    assert spec_of().benchmark.derived == {}
