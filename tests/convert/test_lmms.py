"""Tiny releases of LLaVA-OneVision and LLaVA-Video under the original names, loaded as they are."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import espalier
from espalier.harness.cost.facts import StackFacts
from espalier.harness.errors import UserError
from tests.convert.test_llava import copied, released
from tests.families.onevision import ONEVISION, PINPOINTS, VIDEO, video, watch
from tests.tiny import load_tiny, picture, save_tiny

TOWER = StackFacts(2, 32, 48, 16, 16, 2, gated=False, causal=False)

#: What each release holds.
SPECS = {
    "llava_video": replace(VIDEO, facts=replace(VIDEO.facts, tower=TOWER)),
    "llava_onevision": replace(ONEVISION, facts=replace(ONEVISION.facts, tower=TOWER)),
}
ONE = torch.zeros(1)
CHATS = [watch("w1 w2 w3", video(0)), watch("w4", video(1), picture(0, 35, 35))]


@pytest.fixture(scope="module", params=SPECS)
def release(request, tmp_path_factory):
    """The name of a family, a release of it, and the adapter of the model that it holds."""
    return request.param, *release_of(request.param, tmp_path_factory)


def release_of(kind, tmp_path_factory):
    """Write a tiny model as its authors would have released it."""
    folder, spec = tmp_path_factory.mktemp("release"), SPECS[kind]
    source = load_tiny(spec, save_tiny(spec, tmp_path_factory.mktemp("source")))
    tensors = {
        released(name): value.float().contiguous()
        for name, value in source.model.state_dict().items()
    }
    assert {"model.image_newline", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"} <= set(
        tensors
    )
    save_file(tensors, folder / "model.safetensors")
    text = source.model.config.text_config
    config = {
        "architectures": ["LlavaQwenForCausalLM"],
        "model_type": "llava_qwen",
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_hidden_layers": text.num_hidden_layers,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": text.num_key_value_heads,
        "max_position_embeddings": text.max_position_embeddings,
        "rms_norm_eps": text.rms_norm_eps,
        "rope_theta": text.rope_parameters["rope_theta"],
        "tie_word_embeddings": False,
        "vocab_size": text.vocab_size,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "image_aspect_ratio": "anyres_max_2",
        "image_grid_pinpoints": PINPOINTS,
        "mm_newline_position": "one_token",
        "mm_spatial_pool_mode": "bilinear",
    }
    if kind == "llava_video":
        config |= {"mm_newline_position": "grid", "image_grid_pinpoints": [[35, 35]]}
        config["mm_spatial_pool_stride"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    source.processor.tokenizer.save_pretrained(folder)
    return folder, source


def test_a_release_loads_without_conversion(release, tmp_path):
    kind, folder, source = release
    adapter = load_tiny(SPECS[kind], folder)
    assert adapter.processor.tokenizer.padding_side == "left"
    inputs, expected = adapter.encode(CHATS), source.encode(CHATS)
    for key in ("input_ids", "pixel_values", "pixel_values_videos"):
        assert torch.equal(inputs[key], expected[key])
    with torch.inference_mode():
        assert torch.equal(adapter.model(**inputs).logits, source.model(**expected).logits)
    with pytest.raises(UserError, match="model=llava_video_7b with"):
        espalier.load(folder, device="cpu")
    other = copied(folder, tmp_path / "other", mm_projector_type="linear")
    with pytest.raises(UserError, match="mm_projector_type='linear' cannot be loaded"):
        load_tiny(SPECS[kind], other)


def test_a_release_of_the_other_family_is_refused(release):
    kind, folder, _ = release
    (other,) = SPECS.keys() - {kind}
    with pytest.raises(UserError, match=r"mm_newline_position=.* cannot be loaded"):
        load_tiny(SPECS[other], folder)


def test_unknown_and_missing_tensors_are_refused(release, tmp_path):
    kind, folder, _ = release
    for problem, change in {
        "unexpected keys": lambda tensors: {**tensors, "model.vision_resampler.weight": ONE},
        "missing keys": lambda tensors: dict(sorted(tensors.items())[:-1]),
    }.items():
        changed = copied(folder, tmp_path / problem.split()[0])
        file = changed / "model.safetensors"
        save_file(change(load_file(file)), file)
        with pytest.raises(UserError, match=f"has 1 {problem}"):
            load_tiny(SPECS[kind], changed)


def test_a_tied_head_need_not_be_there(release, tmp_path):
    kind, folder, _ = release
    tied = copied(folder, tmp_path / "tied", tie_word_embeddings=True)
    tensors = load_file(tied / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tied / "model.safetensors")
    architecture = SPECS[kind].architecture
    model = {**architecture["model"], "tie_word_embeddings": True}
    adapter = load_tiny(replace(SPECS[kind], architecture={**architecture, "model": model}), tied)
    words = adapter.model.model.language_model.embed_tokens.weight
    assert torch.equal(adapter.model.lm_head.weight, words)


@pytest.mark.slow
def test_pooling_of_a_release_can_be_chosen(tmp_path_factory):
    folder, _ = release_of("llava_video", tmp_path_factory)
    for how, side in (("average", 2), ("bilinear", 3)):
        adapter = load_tiny(replace(SPECS["llava_video"], processor={"video_pooling": how}), folder)
        assert adapter.layout(adapter.encode([watch("w", video(0))])).counts == (3 * side**2,)
