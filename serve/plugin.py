"""What vLLM calls when it starts (entry point `vllm.general_plugins`), in each of its processes."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from logging import getLogger
from typing import Any

from espalier.serve.adapter import (
    RATE,
    TESTED,
    after_own_checks,
    is_tested,
    vllm_version,
)
from espalier.serve.families import FAMILIES, PLAIN, PRUNED
from espalier.serve.processor import check_served, engine_setting
from espalier.serve.setting import KEY, SettingError, is_on


def register() -> None:
    """Let engines with the plug-in's setting load a pruned model; any other engine stays as it is.

    A version of vLLM that was not tested gets a warning, and refuses the setting.
    """
    installed = vllm_version()
    with suppress(ImportError):  # a version that was not tested may have no such checks
        after_own_checks(FAMILIES, partial(check_model, installed))
    if not is_tested(installed):
        line = "vllm==%s was not tested with this plug-in, which does nothing; tested: %s"
        getLogger(f"vllm.{KEY}").warning(line, installed, ", ".join(TESTED))
        return
    from vllm import ModelRegistry

    for name in FAMILIES:
        for kind in (PLAIN, PRUNED):
            ModelRegistry.register_model(kind + name, f"espalier.serve.architectures:{kind}{name}")


def check_model(installed: str, name: str, model_config: Any) -> None:
    """Raise SettingError for what cannot be served; choose the pruned model. Does nothing without the setting.

    Args:
        installed: version of vLLM.
        name: of the checkpoint's architecture.
        model_config: of the engine.
    """
    if not is_on(model_config.hf_config):
        return
    if not is_tested(installed):
        raise SettingError(
            f"hf_overrides.{KEY}: vllm=={installed} was not tested with this plug-in; valid: {', '.join(TESTED)}"
        )
    prepare(name, model_config)
    # The harness imports this module for its checks, and counts nothing.
    from espalier.serve.metrics import make_folder

    make_folder()


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
    if model_config.uses_mrope and model_config.multimodal_config is not None:
        model_config.multimodal_config.video_pruning_rate = RATE
    # vLLM looks up the class of model and processor by this list, in every process.
    model_config.hf_config.architectures = [PRUNED + name]


def _check_model(name: str, model_config: Any) -> None:
    """Raise SettingError for vLLM's own pruning, for towers in pieces or of other types."""
    multimodal, config = model_config.multimodal_config, model_config.hf_config
    if multimodal is not None and multimodal.video_pruning_rate:
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
    if kind != "default":  # three equal axes are the plain rule, and no other
        raise SettingError(
            f"espalier.positions='original' on a decoder with rope_type={kind!r} was not tested; "
            'valid: --hf-overrides \'{"espalier": {"positions": "renumbered"}}\''
        )
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rotary["mrope_section"] = [head // 2, 0, 0]
