"""The plug-in's start: engines without its setting stay as they are, whatever the version of vLLM."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from transformers import PixtralVisionConfig

from espalier.serve import plugin
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
    """A model runner that loads `model`."""

    def __init__(self, model: Any, architecture: str) -> None:
        self.model = model
        config = SimpleNamespace(architectures=[architecture] if architecture else None)
        self.model_config = SimpleNamespace(hf_config=config)
        self.is_multimodal_pruning_enabled = False

    def load_model(self) -> str:
        return "loaded"

    def get_model(self) -> Any:
        return self.model


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the plug-in changes in vLLM."""
    registered: dict[str, str] = {}
    checks: dict[str, Any] = {"Qwen3VLForConditionalGeneration": OwnCheck}
    registry = SimpleNamespace(register_model=registered.__setitem__)
    runners = [type(name, (Runner,), {}) for name in ("GPUModelRunner", "CPUModelRunner")]
    put_module(monkeypatch, "vllm", ModelRegistry=registry, __version__="0.40.0.dev1")
    put_module(monkeypatch, CHECKS, MODELS_CONFIG_MAP=checks, VerifyAndUpdateConfig=Check)
    for place, runner in zip(("gpu", "cpu"), runners, strict=True):
        name = f"vllm.v1.worker.{place}_model_runner"
        put_module(monkeypatch, name, **{runner.__name__: runner})
    monkeypatch.setattr(plugin, "version", {"vllm": "0.32.0+cpu"}.__getitem__)
    return SimpleNamespace(registered=registered, checks=checks, runners=runners)


def engine(config: Any, **changes: Any) -> SimpleNamespace:
    """An engine with all that the plug-in refuses: a compiled and captured tower, the second runner."""
    compilation = SimpleNamespace(compile_mm_encoder=True, cudagraph_mm_encoder=True)
    settings = {"compilation_config": compilation, "use_v2_model_runner": True, **changes}
    return SimpleNamespace(model_config=ModelConfig(config), **settings)


@pytest.mark.parametrize("installed", ["0.32.0+cpu", "0.32.1", "0.99.0"])
def test_an_engine_without_the_setting_stays_as_it_is(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    monkeypatch.setattr(plugin, "version", {"vllm": installed}.__getitem__)
    plugin.register()
    assert not set(vllm.registered) & set(FAMILIES)
    for name in FAMILIES:
        config = llava_config(architectures=[name])
        before = config.to_dict()
        running = engine(config)
        vllm.checks[name].verify_and_update_model_config(running.model_config)
        vllm.checks[name].verify_and_update_config(running)
        assert config.to_dict() == before
        seen = OwnCheck.seen if name.startswith("Qwen3VL") else Check.seen
        assert seen[-2:] == [running.model_config, running]
    for runner in vllm.runners:
        for mark in ("is_multimodal_pruning_enabled", "channelled"):
            for architecture in (NAME, "Qwen3ForCausalLM", ""):
                loading = runner(SimpleNamespace(**{mark: True}), architecture)
                assert loading.load_model() == "loaded"
                assert not loading.is_multimodal_pruning_enabled


def test_a_version_that_was_not_tested_refuses_the_setting_alone(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "version", {"vllm": "0.32.1"}.__getitem__)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    (record,) = caplog.records
    assert record.name == "vllm.espalier"
    assert "vllm==0.32.1 was not tested with this plug-in, which does nothing" in record.message
    assert not vllm.registered
    assert not any(hasattr(runner.load_model, "of_espalier") for runner in vllm.runners)
    engine_config = engine(llava_config(espalier={}))
    for check, part in (
        (vllm.checks[NAME].verify_and_update_model_config, engine_config.model_config),
        (vllm.checks[NAME].verify_and_update_config, engine_config),
    ):
        with pytest.raises(SettingError) as error:
            check(part)
        assert str(error.value) == (
            "hf_overrides.espalier: vllm==0.32.1 was not tested with this plug-in; valid: 0.32.0"
        )


def test_a_version_without_such_checks_or_under_another_name_starts(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_package(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(plugin, "version", no_package)
    del sys.modules[CHECKS].MODELS_CONFIG_MAP
    plugin.register()
    assert "vllm==0.40.0.dev1 was not tested" in caplog.text
    assert not vllm.registered


def test_the_setting_chooses_the_pruned_class_and_three_axes(vllm: SimpleNamespace) -> None:
    plugin.register()
    plugin.register()  # in each process, and maybe twice in one
    assert set(vllm.registered) == {mark + name for mark in (PLAIN, PRUNED) for name in FAMILIES}
    assert vllm.registered[PRUNED + NAME] == f"espalier.serve.architectures:{NAME}"
    for positions, axes in (("original", True), ("renumbered", False)):
        config = llava_config(espalier={"method": "divprune", "keep": 4, "positions": positions})
        Check.seen.clear()
        vllm.checks[NAME].verify_and_update_model_config(ModelConfig(config))
        assert len(Check.seen) == 1  # vLLM's own check runs once
        assert config.architectures == [PRUNED + NAME]
        section = config.text_config.rope_parameters.get("mrope_section")
        assert section == ([2, 0, 0] if axes else None)
    marks = {PRUNED: "channelled", PLAIN: "is_multimodal_pruning_enabled"}
    for runner in vllm.runners:
        for prefix, mark in marks.items():
            for value in (True, False):
                loading = runner(SimpleNamespace(**{mark: value}), prefix + NAME)
                loading.load_model()
                assert loading.is_multimodal_pruning_enabled is value


def test_both_names_of_a_class_lead_to_one_module(vllm: SimpleNamespace) -> None:
    plugin.register()
    for name, family in FAMILIES.items():
        place = f"vllm.model_executor.models.{family.module}:{family.architecture}"
        assert vllm.registered[PLAIN + name] == place


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


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "compilation_config.compile_mm_encoder=true runs no hooks; valid: false"),
        ({"compile_mm_encoder": False}, "compilation_config.cudagraph_mm_encoder=true"),
        ({"compile_mm_encoder": False, "cudagraph_mm_encoder": False}, "second model runner"),
    ],
)
def test_an_engine_that_runs_no_hooks_is_one_line(changes: dict[str, Any], line: str) -> None:
    running = engine(llava_config(espalier={}))
    vars(running.compilation_config).update(changes)
    with pytest.raises(SettingError, match=line):
        plugin.check_engine(running)
