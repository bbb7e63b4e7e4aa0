"""Hyper-parameters that a paper lets depend on the kind of task."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from espalier.harness.config.composer import compose_section
from espalier.harness.config.resolvers import register
from espalier.harness.errors import tell_once
from tests import commands

spec_of = commands.spec_of


@pytest.mark.parametrize(
    ("model", "benchmark", "K", "alpha"),
    [
        ("llava15_7b", "refcoco_val", 5, 0.5),
        ("llava_next_7b", "refcocog_test", 5, 0.5),
        ("internvl2_5_8b", "refcoco_testA", 2, 0.5),
        ("qwen2_5_vl_7b", "refcoco", 2, 0.5),
        ("llava15_7b", "seedling_vqa", 2, 1.0),
        # The embedded benchmark keeps the setting that all its stored rows have.
        ("seedling", "seedling_rec", 2, 1.0),
    ],
)
def test_d2pruner_has_its_setting_for_localization(
    model: str, benchmark: str, K: int, alpha: float
) -> None:
    spec = spec_of("method=d2pruner", f"model={model}", f"benchmark={benchmark}")
    assert (spec.method.params["K"], spec.method.params["alpha"]) == (K, alpha)


def test_what_the_user_sets_counts_even_if_it_is_the_value_for_other_kinds() -> None:
    spec = spec_of(
        *("method=d2pruner", "model=llava15_7b", "benchmark=refcoco_val"),
        *("method.params.K=2", "method.params.alpha=1.0"),
    )
    assert (spec.method.params["K"], spec.method.params["alpha"]) == (2, 1.0)


def test_another_setting_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    tell_once.cache_clear()
    for _ in range(2):
        spec_of("method=d2pruner", "model=internvl2_5_8b", "benchmark=refcoco_testB")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(
        "method=d2pruner: 0.5 instead of 1.0, as its paper has it for localization"
    )
    spec_of("method=d2pruner", "benchmark=seedling_vqa")
    assert not capsys.readouterr().err


def test_without_a_benchmark_the_usual_value_counts() -> None:
    assert compose_section("method", "d2pruner")["params"]["alpha"] == 1.0


def test_a_kind_that_does_not_exist_is_an_error() -> None:
    register()
    bad = OmegaConf.create({"K": "${by_kind:2, {grounding: 5}}"})
    with pytest.raises(Exception, match="grounding"):
        OmegaConf.to_container(bad, resolve=True)
