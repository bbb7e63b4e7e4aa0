"""Tiny releases of LLaVA-OneVision and LLaVA-Video, under the original names, become checkpoints of their source."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from espalier.harness.cost.facts import StackFacts
from espalier.harness.errors import UserError
from espalier.harness.tools.convert import convert_llava_onevision, convert_llava_video
from tests.families.onevision import ONEVISION, PINPOINTS, VIDEO, video, watch
from tests.tiny import load_tiny, picture, save_tiny

# ---------------------------------------------------------------------- releases of LLaVA-Video

CONVERTIBLE = replace(
    VIDEO,
    conversion="python -m espalier convert llava_video <release directory> <output directory>",
    facts=replace(VIDEO.facts, tower=StackFacts(2, 32, 48, 16, 16, 2, gated=False, causal=False)),
)

#: Names of the model and of the release, prefix by prefix.
RELEASED = [
    ("model.vision_tower.", "model.vision_tower.vision_tower.vision_model."),
    ("model.multi_modal_projector.linear_1.", "model.mm_projector.0."),
    ("model.multi_modal_projector.linear_2.", "model.mm_projector.2."),
    ("model.language_model.", "model."),
]


def released(name):
    for own, theirs in RELEASED:
        if name.startswith(own):
            return theirs + name.removeprefix(own)
    return name


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """A tiny model as its authors would have released it, in two shards; returns (folder, the model's adapter)."""
    folder = tmp_path_factory.mktemp("release")
    source = load_tiny(CONVERTIBLE, save_tiny(CONVERTIBLE, tmp_path_factory.mktemp("source")))
    tensors = {
        released(name): value.float().contiguous()
        for name, value in source.model.state_dict().items()
    }
    assert {"model.image_newline", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"} <= set(
        tensors
    )
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        shard = {name: tensors[name] for name in part}
        save_file(shard, folder / f"model-0000{number}-of-00002.safetensors")
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
        "vocab_size": 999,  # larger than the embedding, as published
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "image_aspect_ratio": "anyres_max_2",
        "image_grid_pinpoints": [[35, 35]],
        "mm_newline_position": "grid",
        "mm_spatial_pool_stride": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    source.processor.tokenizer.save_pretrained(folder)
    return folder, source


def copied(folder, target, **changes):
    """Copy a release, with other entries of config.json."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


def changed_shard(folder, change):
    path = folder / "model-00002-of-00002.safetensors"
    save_file(change(load_file(path)), path)


def test_converted_release_loads_and_gives_the_logits_of_its_source(release, tmp_path, capsys):
    folder, source = release
    assert conversion.main([str(folder), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "1/2 model-00001-of-00002.safetensors" in printed
    assert "2/2" in printed
    assert f"model.path={tmp_path / 'out'}" in printed
    adapter = load_tiny(CONVERTIBLE, tmp_path / "out")
    assert adapter.processor.tokenizer.padding_side == "left"
    chats = [watch("w1 w2 w3", video(0)), watch("w4", video(1), picture(0, 35, 35))]
    inputs, expected = adapter.encode(chats), source.encode(chats)
    assert torch.equal(inputs["input_ids"], expected["input_ids"])
    for key in ("pixel_values", "pixel_values_videos"):
        assert torch.equal(inputs[key], expected[key])
    with torch.inference_mode():
        assert torch.equal(adapter.model(**inputs).logits, source.model(**expected).logits)


def test_pooling_of_a_checkpoint_can_be_chosen(release, tmp_path):
    folder, _ = release
    assert conversion.main([str(folder), str(tmp_path / "out")]) == 0
    for how, side in (("average", 2), ("bilinear", 3)):
        adapter = load_tiny(
            replace(CONVERTIBLE, processor={"video_pooling": how}), tmp_path / "out"
        )
        assert adapter.layout(adapter.encode([watch("w", video(0))])).counts == (3 * side**2,)


def refusal(arguments, capsys):
    assert conversion.main([str(item) for item in arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    return message


def test_unknown_missing_and_misshapen_tensors_are_refused(release, tmp_path, capsys):
    folder, _ = release
    odd = copied(folder, tmp_path / "odd")
    changed_shard(odd, lambda tensors: {**tensors, "model.vision_resampler.weight": torch.zeros(2)})
    assert "'model.vision_resampler.weight'" in refusal([odd, tmp_path / "out"], capsys)
    less = copied(folder, tmp_path / "less")
    changed_shard(less, lambda tensors: dict(sorted(tensors.items())[:-1]))
    assert "lacks 1 of the model's tensors" in refusal([less, tmp_path / "out"], capsys)
    folder_copy = copied(folder, tmp_path / "other", intermediate_size=50)
    assert "has shape" in refusal([folder_copy, tmp_path / "out"], capsys)
    assert not (tmp_path / "out").exists()


def test_releases_of_other_models_are_refused(release, tmp_path, capsys):
    folder, _ = release
    frame = copied(folder, tmp_path / "frame", mm_newline_position="one_token")
    assert "mm_newline_position='one_token'" in refusal([frame, tmp_path / "out"], capsys)
    text = copied(folder, tmp_path / "text", image_grid_pinpoints="(1x1),...,(6x6)")
    assert "image_grid_pinpoints" in refusal([text, tmp_path / "out"], capsys)
    (tmp_path / "empty").mkdir()
    assert "holds no *.safetensors" in refusal([tmp_path / "empty", tmp_path / "out"], capsys)
    assert "is not empty" in refusal([folder, folder], capsys)


def test_an_unconverted_release_is_refused_with_the_command(release):
    folder, _ = release
    with pytest.raises(UserError, match=r"llava_qwen.*python -m espalier convert llava_video"):
        load_tiny(CONVERTIBLE, folder)


