"""Hyper-parameters that a paper lets depend on the kind of task."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from espalier.harness.config.composer import compose_section
from espalier.harness.config.resolvers import register
from espalier.harness.errors import tell_once
from tests import commands


@pytest.mark.parametrize(
    ("line", "K", "alpha"),
    [
        ("model=llava15_7b benchmark=refcoco_val", 5, 0.5),
        ("model=llava_next_7b benchmark=refcocog_test", 5, 0.5),
        ("model=internvl2_5_8b benchmark=refcoco_testA", 2, 0.5),
        ("model=qwen2_5_vl_7b benchmark=refcoco", 2, 0.5),
        ("model=llava15_7b benchmark=seedling_vqa", 2, 1.0),
        # The embedded benchmark keeps the setting that all its stored rows have.
        ("model=seedling benchmark=seedling_rec", 2, 1.0),
        # The user's setting counts even if it is the value for other kinds.
        (
            "model=llava15_7b benchmark=refcoco_val method.params.K=2 method.params.alpha=1.0",
            2,
            1.0,
        ),
    ],
)
def test_d2pruner_has_its_setting_for_localization(line: str, K: int, alpha: float) -> None:
    params = commands.spec_of("method=d2pruner", *line.split()).method.params
    assert (params["K"], params["alpha"]) == (K, alpha)


def test_another_setting_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    tell_once.cache_clear()
    for _ in range(2):
        commands.spec_of("method=d2pruner", "model=internvl2_5_8b", "benchmark=refcoco_testB")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "method=d2pruner: 0.5 instead of 1.0, as its paper has it for localization"
    )
    commands.spec_of("method=d2pruner", "benchmark=seedling_vqa")
    assert not capsys.readouterr().err
    assert compose_section("method", "d2pruner")["params"]["alpha"] == 1.0


def test_a_kind_that_does_not_exist_is_an_error() -> None:
    register()
    bad = OmegaConf.create({"K": "${by_kind:2, {grounding: 5}}"})
    with pytest.raises(Exception, match="grounding"):
        OmegaConf.to_container(bad, resolve=True)
