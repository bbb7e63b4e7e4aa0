"""Refusals before a model is loaded, on a model that denoises and on one that does not."""

from __future__ import annotations

import re

import pytest

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.decoding.diffusion.denoising_settings import check_prefix_cache
from espalier.harness.errors import Refused, UserError
from espalier.harness.runs.admission import Job, admit
from espalier.harness.store.files.digests import Digests
from espalier.methods.d3tom import D3ToM

HERE = ("benchmark=seedling_vqa",)
DENOISING = ("model=seedling_diffusion", "model.weights=random")


def job_of(argv: tuple[str, ...]) -> Job:
    command = read_command([*HERE, *argv])
    assert command is not None
    return admit(build_spec(command.cells[0]), Digests())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("method=vanilla_sd", "denoises its answers"),
        ("method=autoregressive", "denoises its answers"),
        ("method=h2o ratio=0.5", "denoises its answers"),
        ("method=tome ratio=0.5", "inside the vision tower"),
        ("method=downsample ratio=0.5", "changes the pictures"),
        ("method=d3tom ratio=1", "ratio=1"),
        ("method=d3tom budget=average ratio=0.5", "leaves no token under budget=average"),
        ("method=d3tom budget=flops ratio=0.5", "budget='flops' cannot be followed"),
        ("method=d3tom ratio=0.5 method.params.K=5", "method.params.K=5"),
        ("+benchmark.generation.max_new_tokens=16 +model.generation.steps=17", "steps=17 is above"),
        (
            "+benchmark.generation.max_new_tokens=16 +model.generation.block_length=5",
            "max_new_tokens=16 is not a multiple of generation.block_length=5",
        ),
        (
            "+benchmark.generation.max_new_tokens=16 +model.generation.block_length=32",
            "max_new_tokens=16 is not a multiple of generation.block_length=32",
        ),
        (
            "+benchmark.generation.max_new_tokens=16 +model.generation.block_length=4 +model.generation.steps=6",
            "steps=6 is not divisible by 4 blocks",
        ),
        ("+model.generation.steps=0", "model.generation.steps=0 must be an integer of at least 1"),
        ("+model.generation.block_length=2.5", "model.generation.block_length=2.5 must be an int"),
        ("+model.generation.temperature=-1", "temperature=-1 must be a number of at least 0"),
        ("+model.generation.temperature=nan", "temperature=nan must be a number of at least 0"),
        ("+model.generation.temperature=inf", "temperature=inf must be a number of at least 0"),
        ("+model.generation.temperature=hot", "temperature='hot' must be a number of at least 0"),
        ("+model.generation.temperature=true", "temperature=True must be a number of at least 0"),
        ("+model.generation.shift=0 ", "shift=0 must be a number above 0"),
        (
            "+benchmark.generation.max_new_tokens=400",
            "max_new_tokens=400: model='seedling_diffusion' has 512 positions, 144 of them for an image",
        ),
        ("+benchmark.generation.max_new_tokens=1000000", "valid: fewer than 368"),
        ("+model.generation.steps=1000000", "steps=1000000 is above generation.max_new_tokens=16"),
        ("engine.decode=generate", "engine.decode='generate' generates one token after another"),
        ("method=fastv_denoising ratio=1", "ratio=1"),
        ("method=fastv_denoising ratio=0.5 method.params.K=6", "method.params.K=6"),
        ("method=pyramiddrop_denoising ratio=0.3", "valid with method.params.excess=1.5"),
        ("method=pyramiddrop_denoising ratio=0.5 method.params.S=7", "method.params.S=7"),
        ("method=pyramiddrop_denoising ratio=0.5 budget=average", "budget='average' cannot be"),
        ("method=dycoke_decode ratio=0.5", "denoises its answers"),
        ("method=divprune compressor=h2o ratio=0.5", "compressor='h2o' needs a model that"),
        ("+model.generation.schedule=sudden", "schedule='sudden' must be"),
        ("+model.generation.num_beams=2", "num_beams=2 is for models that generate one token"),
        (
            "+model.generation.prefix_cache=true model.facts.diffusion.prefix_cache=false",
            "was not trained that way (model.facts.diffusion.prefix_cache=false); valid: false",
        ),
        (
            "+model.generation.prefix_cache=true method=d3tom ratio=0.5 engine.backend=emulate",
            "engine.backend='emulate' hides tokens by masks",
        ),
        ("+model.generation.prefix_cache=true method=h2o ratio=0.5", "denoises its answers"),
        ("+model.generation.prefix_cache=true method=vanilla_sd", "denoises its answers"),
        ("+model.generation.prefix_cache=perhaps", "prefix_cache"),
        ("engine.rescore=true", "engine.rescore=true"),
        ("+model.facts.text.causal=true", "model.facts.text.causal=true"),
        ("model.facts.diffusion.mask_id=104", "mask_id=104 is not a token; valid: 0 to 103"),
    ],
)
def test_what_cannot_denoise_is_one_line(overrides, line, tmp_path) -> None:
    with pytest.raises(UserError) as error:
        job_of((*DENOISING, f"store={tmp_path}", *overrides.split()))
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("method=d3tom ratio=0.5", "decodes one token after another"),
        ("method=fastv_denoising ratio=0.5", "decodes one token after another"),
        ("method=pyramiddrop_denoising ratio=0.5", "decodes one token after another"),
        ("method=fastv ratio=0.5 +model.generation.steps=4", "generation.steps=4 is for models"),
        ("+model.generation.prefix_cache=true", "generation.prefix_cache=True is for models"),
    ],
)
def test_what_only_denoises_is_one_line_elsewhere(overrides, line, tmp_path) -> None:
    with pytest.raises(UserError) as error:
        job_of(("model=seedling", f"store={tmp_path}", *overrides.split()))
    assert line in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        *("d3tom", "d3tom_t_official", "fastv", "fastv_denoising", "pyramiddrop"),
        *("pyramiddrop_denoising", "random", "visionzip"),
    ],
)
def test_what_can_is_admitted(name, tmp_path) -> None:
    job = job_of((*DENOISING, f"store={tmp_path}", f"method={name}", "ratio=0.9"))
    assert job.spec.budget.ratio == 0.9


@pytest.mark.parametrize(
    ("name", "where"), [("none", "model"), ("fastv", "benchmark"), ("d3tom_t_official", "model")]
)
def test_a_cached_prompt_is_admitted_and_is_another_run(name, where, tmp_path) -> None:
    ratio = 0 if name == "none" else 0.9
    argv = (*DENOISING, f"store={tmp_path}", f"method={name}", f"ratio={ratio}")
    plain, cached = job_of(argv), job_of((*argv, f"+{where}.generation.prefix_cache=true"))
    assert plain.key != cached.key
    settings = [job.parts["settings"][where]["generation"] for job in (plain, cached)]
    assert settings[1] == {**(settings[0] or {}), "prefix_cache": True} != settings[0]


@pytest.mark.parametrize("method", ["vanilla_sd", "pearl", "autoregressive", "h2o"])
def test_a_sweep_may_leave_out_what_generates_token_by_token(method, tmp_path) -> None:
    with pytest.raises(Refused, match=f"method='{method}' needs a model that generates one token"):
        job_of((*DENOISING, f"store={tmp_path}", f"method={method}"))


def test_llada_v_was_not_trained_with_a_prefix_mask(tmp_path) -> None:
    with pytest.raises(UserError, match="model='llada_v_8b' was not trained that way"):
        job_of(
            (
                *("model=llada_v_8b", "model.weights=random", "method=none", f"store={tmp_path}"),
                "+model.generation.prefix_cache=true",
            )
        )


def test_a_method_of_steps_that_knows_no_cache_is_one_line() -> None:
    class OfSteps(D3ToM):
        merges_entries = False

    model = build_spec(read_command([*HERE, *DENOISING]).cells[0]).model
    with pytest.raises(Refused, match="OfSteps to act on; valid: false, or a method that") as error:
        check_prefix_cache(model, OfSteps(K=1), emulate=False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ("+model.generation.steps=17", "steps=17 is above generation.max_new_tokens=16"),
        ("+model.generation.block_length=24", "max_new_tokens=16 is not a multiple of"),
        ("+benchmark.generation.top_p=0.9", "top_p=0.9 changes nothing without a temperature"),
        ("+benchmark.generation.typical_p=0.2", "generation.typical_p=0.2 is for models that"),
        ("+benchmark.generation.max_time=0.1", "generation.max_time=0.1 is for models that"),
        ("model.facts.diffusion.end_ids=[92]", "end_ids=[92] names no token that can be generated"),
        ("+benchmark.generation.threshold=0.9 method=d3tom_t_paper", "the shares of D3ToMT follow"),
    ],
)
def test_a_denoised_answer_has_its_own_length_and_settings(settings, line, tmp_path) -> None:
    """The task's limit of 16 tokens is for models that say one after another; the model's own length is 16, too."""
    argv = (*DENOISING, f"store={tmp_path}", "method=d3tom", "ratio=0.5", *settings.split())
    with pytest.raises(UserError, match=re.escape(line)) as error:
        job_of(argv)
    assert "\n" not in str(error.value)
