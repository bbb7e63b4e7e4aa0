"""What is refused before a model is loaded, on a model that denoises and on one that does not."""

from __future__ import annotations

import pytest

from harness.config.build import build_spec
from harness.config.compose import read_command
from harness.digests import Digests
from harness.errors import UserError
from harness.running.preflight import Job, check

HERE = ("benchmark=seedling_vqa",)
DENOISING = ("model=seedling_diffusion", "model.weights=random")


def job_of(argv: tuple[str, ...]) -> Job:
    command = read_command([*HERE, *argv])
    assert command is not None
    return check(build_spec(command.cells[0]), Digests())


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("method=vanilla_sd", "denoises its answers"),
        ("method=h2o ratio=0.5", "denoises its answers"),
        ("method=tome ratio=0.5", "inside the vision tower"),
        ("method=d3tom ratio=1", "ratio=1"),
        ("method=d3tom budget=average ratio=0.5", "leaves no token under budget=average"),
        ("method=d3tom budget=flops ratio=0.5", "budget='flops' cannot be followed"),
        ("method=d3tom ratio=0.5 method.params.K=5", "method.params.K=5"),
        ("+model.generation.steps=2048", "generation.steps=2048 is above"),
        (
            "+model.generation.max_new_tokens=16 +model.generation.block_length=5",
            "max_new_tokens=16 is no multiple of generation.block_length=5",
        ),
        ("+model.generation.schedule=sudden", "schedule='sudden' must be"),
        ("+model.generation.num_beams=2", "num_beams=2 is of models that say one token"),
        ("+model.generation.prefix_cache=true", "prefix_cache=true"),
        ("engine.rescore=true", "engine.rescore=true"),
        ("model.facts.text.causal=true", "model.facts.text.causal=true"),
        ("model.facts.diffusion.mask_id=104", "mask_id=104 is no token; valid: 0 to 103"),
    ],
)
def test_what_cannot_denoise_is_one_line(overrides, line, tmp_path) -> None:
    with pytest.raises(UserError) as told:
        job_of((*DENOISING, f"store={tmp_path}", *overrides.split()))
    assert line in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("method=d3tom ratio=0.5", "decodes one token after another"),
        ("method=fastv ratio=0.5 +model.generation.steps=4", "generation.steps=4 is of models"),
    ],
)
def test_what_only_denoises_is_one_line_elsewhere(overrides, line, tmp_path) -> None:
    with pytest.raises(UserError) as told:
        job_of(("model=seedling", f"store={tmp_path}", *overrides.split()))
    assert line in str(told.value)


@pytest.mark.parametrize("name", ["d3tom", "d3tom_t_official", "fastv", "random", "visionzip"])
def test_what_can_is_admitted(name, tmp_path) -> None:
    job = job_of((*DENOISING, f"store={tmp_path}", f"method={name}", "ratio=0.9"))
    assert job.spec.budget.ratio == 0.9
