"""Configurations made of published config.json files are those that the files of conf/model state."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from espalier.harness.models.build_adapter import build_skeleton
from espalier.harness.models.families import ADAPTERS
from espalier.harness.models.random_weights import byte_tokenizer
from espalier.harness.tools.convert import convert_llava as conversion
from espalier.harness.tools.convert.convert_llava import INSIDE
from tests.convert.test_llava import released
from tests.tiny import model_of

#: What the published config.json of both versions and sizes states.
COMMON = {
    "architectures": ["LlavaLlamaForCausalLM"],
    "model_type": "llava",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "mm_projector_type": "mlp2x_gelu",
    "mm_resampler_type": None,
    "mm_use_im_patch_token": False,
    "mm_use_im_start_end": False,
    "mm_vision_select_feature": "patch",
    "mm_vision_select_layer": -2,
    "mm_vision_tower": "openai/clip-vit-large-patch14-336",
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
SIZES = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    "13b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40},
}
VIEWS = {
    "llava15": {"image_aspect_ratio": "pad"},
    "llava_next": {
        "image_aspect_ratio": "anyres",
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        "mm_patch_merge_type": "spatial_unpad",
        "rope_theta": 10000.0,
    },
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("version", VIEWS)
def test_a_published_config_of_llava_is_the_one_of_the_config_file(version: str, size: str) -> None:
    heads = SIZES[size]["hidden_size"] // 128
    stated = {"num_attention_heads": heads, "num_key_value_heads": heads}
    spec = model_of(f"model={version}_{size}")
    tokenizer = byte_tokenizer()
    expected = ADAPTERS.load(spec.adapter).configuration(spec, tokenizer)
    skeleton = build_skeleton(ADAPTERS.load(spec.adapter).data.model_class, expected, spec)
    shapes = {released(name): tuple(value.shape) for name, value in skeleton.state_dict().items()}
    shapes["model.embed_tokens.weight"] = (32000, SIZES[size]["hidden_size"])
    release = {**COMMON, **SIZES[size], **stated, **VIEWS[version]}
    config = conversion.configuration(release, shapes, INSIDE, tokenizer)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    assert config.text_config.to_dict() | ids == expected.text_config.to_dict() | ids
    unread = {"projection_dim": None}  # of CLIP's heads, which the tower lacks
    assert config.vision_config.to_dict() | unread == expected.vision_config.to_dict() | unread
    keys = ("vision_feature_layer", "vision_feature_select_strategy", "image_grid_pinpoints")
    assert all(getattr(config, key, None) == getattr(expected, key, None) for key in keys)


#: What the published config.json of LLaVA-OneVision 7B states.
ONEVISION = {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "image_aspect_ratio": "anyres_max_9",
    "image_grid_pinpoints": [
        [384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)
    ],
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "mm_newline_position": "one_token",
    "mm_patch_merge_type": "spatial_unpad",
    "mm_projector_type": "mlp2x_gelu",
    "mm_resampler_type": None,
    "mm_spatial_pool_mode": "bilinear",
    "mm_use_im_patch_token": False,
    "mm_use_im_start_end": False,
    "mm_vision_select_feature": "patch",
    "mm_vision_select_layer": -2,
    "mm_vision_tower": "google/siglip-so400m-patch14-384",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


def test_a_published_config_of_onevision_is_the_one_of_the_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(model_of("model=llava_ov_7b"), path=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava_qwen", **ONEVISION}))
    adapter, tokenizer = ADAPTERS.load(spec.adapter), byte_tokenizer()
    expected = adapter.configuration(spec, tokenizer)
    monkeypatch.setattr(adapter, "read_tokenizer", lambda spec: tokenizer)
    config = adapter.checkpoint_config(spec)
    rows = {"vocab_size": expected.text_config.vocab_size}
    assert {**config.text_config.to_dict(), **rows} == expected.text_config.to_dict()
    assert config.vision_config.to_dict() == expected.vision_config.to_dict()
    for key in ("vision_feature_layer", "vision_aspect_ratio"):
        assert getattr(config, key) == getattr(expected, key)
    assert sorted(config.image_grid_pinpoints) == sorted(expected.image_grid_pinpoints)
