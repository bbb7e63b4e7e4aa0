"""Modules and configurations of vLLM as far as the plug-in reads them, so that its code runs where no vLLM is."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import Tensor
from transformers import LlavaConfig

from espalier.serve import digits


def put_module(patch: pytest.MonkeyPatch, name: str, **names: Any) -> ModuleType:
    """A module of that name, with its parents, until the test ends."""
    parts = name.split(".")
    for length in range(1, len(parts)):
        parent = ".".join(parts[:length])
        patch.setitem(sys.modules, parent, sys.modules.get(parent) or ModuleType(parent))
    module = sys.modules.get(name) or ModuleType(name)
    for key, value in names.items():
        setattr(module, key, value)
    patch.setitem(sys.modules, name, module)
    return module


def llava_config(**changes: Any) -> Any:
    """A checkpoint of LLaVA with 4 x 4 patches, 4 tower layers and 3 decoder layers."""
    text = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    vision = {
        "model_type": "clip_vision_model",
        "image_size": 8,
        "patch_size": 2,
        "num_hidden_layers": 4,
    }
    config = LlavaConfig(text_config=text, vision_config=vision)
    config.architectures = ["LlavaForConditionalGeneration"]
    for name, value in changes.items():
        setattr(config, name, value)
    return config


class ModelConfig:
    """vLLM's configuration of a model."""

    def __init__(self, config: Any, video_pruning_rate: float = 0.0, tp_mode: str = "weights"):
        self.hf_config = config
        self.hf_text_config = config.get_text_config()
        self.architecture = config.architectures[0]
        self.multimodal_config = SimpleNamespace(
            video_pruning_rate=video_pruning_rate,
            mm_encoder_tp_mode=tp_mode,
        )

    @property
    def uses_mrope(self) -> bool:
        return "mrope_section" in self.hf_text_config.rope_parameters


def split(channels: Tensor) -> tuple[Tensor, Tensor]:
    """The embeddings and the numbers (T, NUMBERS) of `digits.append`."""
    return channels[:, : -digits.WIDTH], digits.decode(channels[:, -digits.WIDTH :])
