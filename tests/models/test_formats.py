"""Unsupported checkpoints are refused by config.json alone, with a remedy in the line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import espalier
from espalier.harness.errors import UserError
from espalier.harness.models.build_adapter import load_adapter
from tests.tiny import LLAVA


def folder_with(tmp_path: Path, **config: Any) -> Path:
    """A folder that holds nothing but a configuration."""
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


ORIGINAL = [
    ("llava", "LlavaLlamaForCausalLM", "llava-1.5-7b-hf"),
    ("llava_llama", "LlavaLlamaForCausalLM", "llava-1.5-7b-hf"),
    ("llava", "LlavaQwenForCausalLM", "llava-onevision-qwen2-7b-ov-hf"),
    ("llava_mistral", "LlavaMistralForCausalLM", "llava-v1.6-mistral-7b-hf"),
    ("internvl_chat", "InternVLChatModel", "-hf at the end"),
]


@pytest.mark.parametrize(("kind", "name", "way"), ORIGINAL)
def test_a_first_release_is_refused_with_its_sibling(
    tmp_path: Path, kind: str, name: str, way: str
) -> None:
    folder = folder_with(tmp_path, model_type=kind, architectures=[name])
    for spec in (
        replace(LLAVA, weights="trained", path=folder, hub=None),
        replace(LLAVA, weights="trained", path=folder, hub="somebody/llava-hf"),
    ):
        with pytest.raises(UserError, match=f"first release .{kind}, {name}.") as refusal:
            load_adapter(spec)
        assert (spec.hub or way) in str(refusal.value)
    with pytest.raises(espalier.UserError, match=way):
        espalier.load(folder)
