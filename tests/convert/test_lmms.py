"""Tiny releases under the original names: LLaVA-OneVision's is converted, LLaVA-Video's is loaded as it is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import espalier
from espalier.harness.cost.facts import StackFacts
from espalier.harness.errors import UserError
from espalier.harness.tools.convert import convert_llava_onevision
from tests.convert.test_llava import copied, released
from tests.families.onevision import ONEVISION, PINPOINTS, VIDEO, video, watch
from tests.tiny import load_tiny, picture, save_tiny

TOWER = StackFacts(2, 32, 48, 16, 16, 2, gated=False, causal=False)

#: What each release becomes, with the rows of the embedding that it has and those of its checkpoint.
SPECS = {
    "llava_video": replace(VIDEO, facts=replace(VIDEO.facts, tower=TOWER)),
    "llava_onevision": replace(
        ONEVISION, facts=replace(ONEVISION.facts, tower=TOWER, vocabulary=320)
    ),
}
TOKENS = {"llava_video": 288, "llava_onevision": 300}
CHATS = [watch("w1 w2 w3", video(0)), watch("w4", video(1), picture(0, 35, 35))]


@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    """Each release, and the adapter of the model that it holds."""
    return {name: release_of(name, tmp_path_factory) for name in SPECS}


@pytest.fixture
def release(releases):
    return releases["llava_onevision"]


def release_of(kind, tmp_path_factory):
    """Write a tiny model as its authors would have released it, in two shards."""
    folder, spec = tmp_path_factory.mktemp("release"), SPECS[kind]
    source = load_tiny(spec, save_tiny(spec, tmp_path_factory.mktemp("source")))
    rows = TOKENS[kind]
    with torch.no_grad():
        for table in (source.model.model.language_model.embed_tokens, source.model.lm_head):
            table.weight[rows:] = table.weight[:rows].float().mean(0)
    tensors = {
        released(name): value.float().contiguous()
        for name, value in source.model.state_dict().items()
    }
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:rows].clone()
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
        "image_grid_pinpoints": PINPOINTS,
        "mm_newline_position": "one_token",
        "mm_spatial_pool_mode": "bilinear",
    }
    if kind == "llava_video":
        config["vocab_size"] = rows
        config |= {"mm_newline_position": "grid", "image_grid_pinpoints": [[35, 35]]}
        config["mm_spatial_pool_stride"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    source.processor.tokenizer.save_pretrained(folder)
    return folder, source


def changed_shard(folder, change):
    path = folder / "model-00002-of-00002.safetensors"
    save_file(change(load_file(path)), path)


def test_converted_release_loads_and_gives_the_logits_of_its_source(release, tmp_path, capsys):
    folder, source = release
    assert convert_llava_onevision.main([str(folder), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "1/2 model-00001-of-00002.safetensors" in printed
    assert "2/2" in printed
    assert f"model.path={tmp_path / 'out'}" in printed
    adapter = load_tiny(SPECS["llava_onevision"], tmp_path / "out")
    assert adapter.processor.tokenizer.padding_side == "left"
    inputs, expected = adapter.encode(CHATS), source.encode(CHATS)
    assert torch.equal(inputs["input_ids"], expected["input_ids"])
    for key in ("pixel_values", "pixel_values_videos"):
        assert torch.equal(inputs[key], expected[key])
    with torch.inference_mode():
        assert torch.equal(adapter.model(**inputs).logits, source.model(**expected).logits)


def test_a_onevision_checkpoint_describes_itself(releases, tmp_path):
    folder, source = releases["llava_onevision"]
    assert convert_llava_onevision.main([str(folder), str(tmp_path / "out")]) == 0
    model = espalier.load(tmp_path / "out", device="cpu")
    with model.open_adapter() as adapter:
        assert adapter.render(CHATS[1]) == source.render(CHATS[1])


def test_a_tied_head_need_not_be_there(releases, tmp_path):
    folder = copied(releases["llava_onevision"][0], tmp_path / "tied", tie_word_embeddings=True)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        tensors.pop("lm_head.weight", None)
        save_file(tensors, file)
    assert convert_llava_onevision.main([str(folder), str(tmp_path / "out")]) == 0
    with espalier.load(tmp_path / "out", device="cpu").open_adapter() as adapter:
        words = adapter.model.model.language_model.embed_tokens.weight
        assert torch.equal(adapter.model.lm_head.weight, words)
        assert len(words) == 320


def test_pooling_of_a_checkpoint_can_be_chosen(video_release):
    folder, _ = video_release
    for how, side in (("average", 2), ("bilinear", 3)):
        adapter = load_tiny(replace(SPECS["llava_video"], processor={"video_pooling": how}), folder)
        assert adapter.layout(adapter.encode([watch("w", video(0))])).counts == (3 * side**2,)


def refusal(arguments, capsys):
    assert convert_llava_onevision.main([str(item) for item in arguments]) == 2
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
    frame = copied(folder, tmp_path / "frame", mm_newline_position="grid")
    assert "mm_newline_position='grid'" in refusal([frame, tmp_path / "out"], capsys)
    text = copied(folder, tmp_path / "text", image_grid_pinpoints="(1x1),...,(6x6)")
    assert "image_grid_pinpoints" in refusal([text, tmp_path / "out"], capsys)
    (tmp_path / "empty").mkdir()
    assert "holds no *.safetensors" in refusal([tmp_path / "empty", tmp_path / "out"], capsys)
    assert "is not empty" in refusal([folder, folder], capsys)


def test_an_unconverted_release_of_onevision_is_refused_with_the_command(releases):
    folder, _ = releases["llava_onevision"]
    command = f"llava_qwen.*python -m espalier convert llava_onevision {folder}"
    with pytest.raises(UserError, match=command):
        load_tiny(SPECS["llava_onevision"], folder)


@pytest.fixture(scope="module")
def video_release(releases, tmp_path_factory):
    """The release of LLaVA-Video in one file, as a folder without an index has to be."""
    sharded, source = releases["llava_video"]
    folder = copied(sharded, tmp_path_factory.mktemp("video") / "release")
    shards = sorted(folder.glob("*.safetensors"))
    save_file(load_file(shards[0]) | load_file(shards[1]), folder / "model.safetensors")
    for shard in shards:
        shard.unlink()
    return folder, source


def test_a_release_of_llava_video_loads_without_conversion(video_release, tmp_path):
    folder, source = video_release
    adapter = load_tiny(SPECS["llava_video"], folder)
    inputs, expected = adapter.encode(CHATS), source.encode(CHATS)
    assert torch.equal(inputs["input_ids"], expected["input_ids"])
    with torch.inference_mode():
        assert torch.equal(adapter.model(**inputs).logits, source.model(**expected).logits)
    with pytest.raises(UserError, match="model=llava_video_7b with"):
        espalier.load(folder, device="cpu")
    other = copied(folder, tmp_path / "other", mm_projector_type="linear")
    with pytest.raises(UserError, match="mm_projector_type='linear' cannot be loaded"):
        load_tiny(SPECS["llava_video"], other)
