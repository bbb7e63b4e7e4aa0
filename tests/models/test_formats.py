"""Unsupported checkpoints are refused by config.json alone, with a remedy in the line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import espalier
from espalier.harness.models.build_adapter import load_adapter
from tests.refused import refused
from tests.tiny import LLAVA

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
    config = {"model_type": kind, "architectures": [name]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for hub in (None, "somebody/llava-hf"):
        line = refused(load_adapter, replace(LLAVA, weights="trained", path=tmp_path, hub=hub))
        assert re.search(f"first release .{kind}, {name}.", line)
        assert (hub or way) in line
    with pytest.raises(espalier.UserError, match=way):
        espalier.load(tmp_path)
