"""The plug-in's start: engines without its setting stay as they are, whatever the version of vLLM."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from transformers import PixtralVisionConfig

from espalier.serve import adapter, plugin
from espalier.serve.architectures import check_adapters
from espalier.serve.families import FAMILIES, PLAIN, PRUNED
from espalier.serve.setting import SettingError
from tests.serve.stubs import ModelConfig, llava_config, put_module

NAME = "LlavaForConditionalGeneration"

CHECKS = "vllm.model_executor.models.config"


class Check:
    """A check of vLLM's, which writes down what it saw."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def verify_and_update_model_config(cls, model_config: Any) -> None:
        cls.seen.append(model_config)

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        cls.seen.append(vllm_config)


class OwnCheck(Check):
    """The check that vLLM has for one family."""

    seen: ClassVar[list[Any]] = []


class Runner:
    """vLLM's first runner for processors, which leaves pruning off."""

    def __init__(self, multimodal_config: Any) -> None:
        self.model_config = SimpleNamespace(multimodal_config=multimodal_config)
        self.is_multimodal_pruning_enabled = False


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the plug-in changes in vLLM."""
    registered: dict[str, str] = {}
    checks: dict[str, Any] = {"Qwen3VLForConditionalGeneration": OwnCheck}
    registry = SimpleNamespace(register_model=registered.__setitem__)
    put_module(monkeypatch, "vllm", ModelRegistry=registry, __version__="0.40.0.dev1")
    put_module(monkeypatch, CHECKS, MODELS_CONFIG_MAP=checks, VerifyAndUpdateConfig=Check)
    monkeypatch.setattr(adapter, "version", {"vllm": "0.32.0+cpu"}.__getitem__)
    return SimpleNamespace(registered=registered, checks=checks)


@pytest.mark.parametrize("installed", ["0.32.0+cpu", "0.32.1", "0.99.0"])
def test_an_engine_without_the_setting_stays_as_it_is(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    monkeypatch.setattr(adapter, "version", {"vllm": installed}.__getitem__)
    plugin.register()
    assert not set(vllm.registered) & set(FAMILIES)
    for name in FAMILIES:
        config = llava_config(architectures=[name])
        before = config.to_dict()
        model_config = ModelConfig(config)
        vllm.checks[name].verify_and_update_model_config(model_config)
        vllm.checks[name].verify_and_update_config("an engine")
        assert config.to_dict() == before
        assert model_config.multimodal_config.video_pruning_rate == 0
        seen = OwnCheck.seen if name.startswith("Qwen3VL") else Check.seen
        assert seen[-2:] == [model_config, "an engine"]


def test_a_version_that_was_not_tested_refuses_the_setting_alone(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(adapter, "version", {"vllm": "0.32.1"}.__getitem__)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    (record,) = caplog.records
    assert record.name == "vllm.espalier"
    assert "vllm==0.32.1 was not tested with this plug-in, which does nothing" in record.message
    assert not vllm.registered
    with pytest.raises(SettingError) as error:
        vllm.checks[NAME].verify_and_update_model_config(ModelConfig(llava_config(espalier={})))
    assert str(error.value) == (
        "hf_overrides.espalier: vllm==0.32.1 was not tested with this plug-in; valid: 0.31.0, 0.32.0"
    )


def test_a_version_without_such_checks_or_under_another_name_starts(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_package(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(adapter, "version", no_package)
    del sys.modules[CHECKS].MODELS_CONFIG_MAP
    plugin.register()
    assert "vllm==0.40.0.dev1 was not tested" in caplog.text
    assert not vllm.registered


def test_the_setting_chooses_the_pruned_class_and_three_axes(vllm: SimpleNamespace) -> None:
    plugin.register()
    plugin.register()  # in each process, and maybe twice in one
    assert set(vllm.registered) == {mark + name for mark in (PLAIN, PRUNED) for name in FAMILIES}
    for name, place in vllm.registered.items():
        assert place == f"espalier.serve.architectures:{name}"
    for positions, axes in (("original", True), ("renumbered", False)):
        config = llava_config(espalier={"method": "divprune", "keep": 4, "positions": positions})
        Check.seen.clear()
        model_config = ModelConfig(config)
        vllm.checks[NAME].verify_and_update_model_config(model_config)
        assert len(Check.seen) == 1  # vLLM's own check runs once
        assert config.architectures == [PRUNED + NAME]
        section = config.text_config.rope_parameters.get("mrope_section")
        assert section == ([2, 0, 0] if axes else None)
        # vLLM's runners ask for positions; its processors shorten nothing.
        assert (model_config.multimodal_config.video_pruning_rate > 0) is axes
        copied = adapter.without_own_pruning(model_config)
        assert copied.multimodal_config.video_pruning_rate is None
        assert (model_config.multimodal_config.video_pruning_rate > 0) is axes
        assert copied.hf_config is config


def test_the_runner_for_processors_asks_as_that_for_gpus_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter.let_cpu_runner_ask()  # no such runner is loaded
    kind = type("CPUModelRunner", (Runner,), {})
    put_module(monkeypatch, "vllm.v1.worker.cpu_model_runner", CPUModelRunner=kind)
    for pruned in (True, False):
        config = SimpleNamespace(is_multimodal_pruning_enabled=lambda pruned=pruned: pruned)
        before = kind(config)
        adapter.let_cpu_runner_ask()
        for runner in (before, kind(config)):
            assert runner.is_multimodal_pruning_enabled is pruned
    assert not kind(None).is_multimodal_pruning_enabled  # a model of words


@pytest.mark.parametrize(
    ("changes", "engine_changes", "line"),
    [
        ({"espalier": {"method": "fastv"}}, {}, "'fastv' cannot be served"),
        ({"espalier": {"ratio": 0.5, "keep": 2}}, {}, "contradict each other; valid: one of both"),
        ({"espalier": "divprune"}, {}, "espalier='divprune' is no table"),
        ({"vision_feature_layer": [-2, -1]}, {}, "vision_feature_layer=[-2, -1]: a projector"),
        (
            {"vision_config": PixtralVisionConfig()},
            {},
            "vision_config.model_type='pixtral' has another number of tokens for each picture; valid: clip",
        ),
        ({}, {"video_pruning_rate": 0.5}, "--video-pruning-rate=0.5 would prune videos before"),
        ({}, {"tp_mode": "data"}, "--mm-encoder-tp-mode=data gives each process other pictures"),
    ],
)
def test_a_model_that_cannot_be_served_is_one_line(
    changes: dict[str, Any], engine_changes: dict[str, Any], line: str
) -> None:
    config = llava_config(**{"espalier": {}, **changes})
    with pytest.raises(SettingError) as error:
        plugin.prepare(NAME, ModelConfig(config, **engine_changes))
    assert line in str(error.value)
    assert "\n" not in str(error.value)
    assert config.architectures == [NAME]


def test_scaled_positions_are_refused_unless_they_are_renumbered() -> None:
    config = llava_config(espalier={"method": "divprune", "keep": 4})
    config.text_config.rope_parameters["rope_type"] = "yarn"
    with pytest.raises(SettingError, match="rope_type='yarn' was not tested"):
        plugin.prepare(NAME, ModelConfig(config))


def test_adapters_of_the_tower_are_one_line() -> None:
    check_adapters(None)
    check_adapters(SimpleNamespace(enable_tower_connector_lora=False))
    with pytest.raises(SettingError, match=r"tower-connector-lora=true .* valid: false"):
        check_adapters(SimpleNamespace(enable_tower_connector_lora=True))
