"""Refusals before a model is loaded, on a model that denoises and on one that does not."""

from __future__ import annotations

import pytest

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.decoding.diffusion.denoising_settings import Denoising, check_caches
from espalier.harness.errors import Refused, UserError
from espalier.harness.runs.admission import Job, admit
from espalier.harness.store.files.digests import Digests
from espalier.methods.d3tom import D3ToM
from tests import commands

HERE = ("benchmark=seedling_vqa",)
DENOISING = ("model=seedling_diffusion", "model.weights=random")


def job_of(argv: tuple[str, ...]) -> Job:
    return admit(commands.spec_of(*HERE, *argv), Digests())


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


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["every=4"], "prefix_cache=.* keep for 4 of them; valid: true, or method.params.every=1"),
        (["every=0"], "every=0 .*; valid: a number of steps, at least 1"),
        (
            ["every=2", "direction=low_to_high"],
            "every=2 .*; valid: 1 .each step has a share of its",
        ),
    ],
)
def test_a_choice_that_cannot_be_shared_is_one_line(settings, line, tmp_path) -> None:
    params = [f"method.params.{setting}" for setting in settings]
    argv = (*DENOISING, f"store={tmp_path}", "method=d3tom_t", "ratio=0.9", *params)
    with pytest.raises(UserError, match=line):
        job_of(argv)


def test_a_shared_choice_is_another_run(tmp_path) -> None:
    argv = (*DENOISING, f"store={tmp_path}", "method=d3tom", "ratio=0.9")
    argv = (*argv, "+model.generation.prefix_cache=true")
    plain, shared = job_of(argv), job_of((*argv, "method.params.every=4"))
    assert plain.key != shared.key
    params = [job.parts["settings"]["method"]["params"]["every"] for job in (plain, shared)]
    assert params == [1, 4]


def test_a_method_of_steps_that_knows_no_cache_is_one_line() -> None:
    class OfSteps(D3ToM):
        merges_entries = False

    model = build_spec(read_command([*HERE, *DENOISING]).cells[0]).model
    settings = Denoising.of({"prefix_cache": True}, model.facts.diffusion)
    with pytest.raises(Refused, match="OfSteps to act on; valid: false, or a method that"):
        check_caches(settings, model, OfSteps(K=1), False, 1)
