"""Grouping of cells into jobs, resources of a job, and the precedence of their sources."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from safetensors import safe_open

from espalier.harness.config.build_spec import build_spec
from espalier.harness.errors import UserError
from espalier.harness.runs.cluster.job_file import group_cells
from espalier.harness.runs.cluster.resources import (
    Resources,
    cluster_of,
    gpus_for,
    on_its_machine,
    parameters,
    resources_of,
    weight_bytes,
)
from espalier.harness.specs.run_spec import ModelSpec
from tests.cluster.test_estimate import composed
from tests.refused import refused

ONE = Resources(gpus=1, cpus=4, memory=2**30)


def model_of(name: str) -> ModelSpec:
    """Return the spec of a config file of conf/model."""
    return build_spec(composed(f"model={name}").cells[0]).model


def taken(*argv: str) -> Resources:
    (config,) = composed(*argv).cells
    return resources_of(config, build_spec(config), cluster_of([config]))


@given(
    models=st.lists(st.sampled_from("abc"), max_size=40),
    at_most=st.integers(min_value=1, max_value=9),
)
def test_jobs_hold_every_cell_once_in_the_order_of_models(models: list[str], at_most: int) -> None:
    cells = [(model, model, ONE, number) for number, model in enumerate(models)]
    jobs = group_cells(cells, at_most)
    order = list(dict.fromkeys(models))
    expected = [
        (model, number) for model in order for number, name in enumerate(models) if name == model
    ]
    assert [(job.model, cell) for job in jobs for cell in job.cells] == expected
    for model in order:
        sizes = [len(job.cells) for job in jobs if job.model == model]
        assert max(sizes) <= at_most
        assert max(sizes) - min(sizes) <= 1
        assert len(sizes) == -(-models.count(model) // at_most)


def test_cells_that_load_or_take_something_else_are_other_jobs() -> None:
    two = Resources(gpus=2, cpus=8, memory=2**31)
    cells = [
        ("a", "fp16", ONE, 1),
        ("b", "fp16", ONE, 2),
        ("a", "fp32", ONE, 3),
        ("a", "fp16", two, 4),
    ]
    assert [(job.model, job.cells) for job in group_cells(cells, 9)] == [
        ("a", (1,)),
        ("a", (3,)),
        ("a", (4,)),
        ("b", (2,)),
    ]


@pytest.mark.parametrize(
    ("model", "billions", "gpus"),
    [
        ("llava15_7b", 6.7, 1),
        ("llava_ov_72b", 72.0, 4),
        ("seedling", 0.0027, 0),
        ("deepseek_ocr2", 3.4, 1),
        ("diffusion_gemma_26b", 25.8, 1),
        ("glm45v", 107.7, 4),
        ("qwen3_5_35b_a3b", 35.1, 2),
        ("qwen3_5_397b_a17b", 396.8, 13),
        ("qwen3_vl_235b_a22b", 235.7, 8),
    ],
)
def test_gpus_follow_the_model(model: str, billions: float, gpus: int) -> None:
    spec = model_of(model)
    # Names of models round their parameters, and leave the tower out or not.
    assert parameters(spec) / 1e9 == pytest.approx(billions, rel=0.08)
    assert taken(f"model={model}").gpus == gpus


def test_parameters_are_those_of_the_shipped_checkpoint() -> None:
    spec = model_of("seedling")
    with safe_open(spec.path / "model.safetensors", framework="pt") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    matrices = [
        shape[0] * shape[1]
        for name, shape in sizes.items()
        # The tower's last layer is not read; positions have no separate matrix.
        if len(shape) == 2
        and "position" not in name
        and ".layers.3." not in name.partition("language")[0]
    ]
    shared = (
        0
        if any("lm_head" in name for name in sizes)
        else spec.facts.vocabulary * spec.facts.text.hidden
    )
    assert parameters(spec) == pytest.approx(sum(matrices) + shared, rel=0.01)


def test_without_a_word_the_weights_decide() -> None:
    assert [gpus_for(model_of("llava_ov_72b"), size * 2**30) for size in (80, 141)] == [3, 2]
    resources = taken("model=llava15_7b")
    # Loading may hold the weights twice, and libraries take some GiB.
    memory = 4 * 2**30 + 2 * weight_bytes(model_of("llava15_7b"))
    assert (resources.cpus, resources.memory) == (4, memory)


@pytest.mark.slow
def test_settings_of_the_user_go_before_those_of_the_model() -> None:
    large = taken("model=llava_ov_72b", "cluster.gpus=8", "cluster.partition=big")
    # The cores are those of the model's file.
    assert (large.gpus, large.partition, large.cpus) == (8, "big", 16)
    assert taken("model=llava_ov_72b", "model.resources.gpus=2").gpus == 2
    assert taken("model=llava15_7b", "cluster.gpus=0").gpus == 0


def test_a_job_computes_on_the_device_of_its_own_machine() -> None:
    for line, gpus, device in (((), 1, "cuda"), ((), 0, "cpu"), (("model.device=cpu",), 1, "cpu")):
        (config,) = composed("model=llava15_7b", *line).cells
        assert on_its_machine(config, build_spec(config), gpus=gpus).model.device == device


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ("cluster.cells_per_job=0", "cluster.cells_per_job=0"),
        ("cluster.memory=lots", "cluster.memory='lots'"),
        ("cluster.gpus=-1", "cluster.gpus=-1"),
        ("cluster.answer_tokens={gqa: 0}", "cluster.answer_tokens.gqa=0"),
        ("model.resources.minutes=0", "model.resources.minutes=0"),
        ("+model.resources.cards=1", "model.resources.cards is not a config key"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(argument: str, key: str) -> None:
    with pytest.raises(UserError, match=key.replace(".", r"\.")):
        taken(argument)


def test_cells_of_one_command_run_in_one_place() -> None:
    cells = [OmegaConf.create({"cluster": {"name": name}}) for name in ("local", "slurm")]
    assert "cells of one sweep differ in where they run" in refused(cluster_of, cells)


def test_where_cells_run_changes_no_run() -> None:
    (here,), (there,) = (
        composed(*line).cells for line in ((), ("cluster=slurm", "cluster.gpus=2"))
    )
    assert build_spec(here) == build_spec(there)
