"""Tiny releases of LLaVA-1.5 and -1.6, under the original names, become checkpoints that answer as their source."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor
from torch import Tensor

import espalier
from espalier.harness.config.checkpoint_names import model_choice
from espalier.harness.cost.facts import StackFacts
from espalier.harness.errors import UserError
from espalier.harness.kinds.checkpoint_check import check_model
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.models.random_weights import byte_tokenizer
from espalier.harness.specs.run_spec import ModelSpec
from espalier.harness.store.files.digests import Digests
from espalier.harness.tools.convert import convert_llava as conversion
from espalier.harness.tools.convert.checkpoint_writer import lengthened
from tests.convert.tokenizers import piece_model, token
from tests.families.llava import PINPOINTS
from tests.tiny import CHATS, SHAPES, chat, clip_architecture, random_model, sharpen, tiny_spec

#: Tokens of the release, and rows of transformers' checkpoints: two placeholders more, a multiple of 64.
TOKENS, ROWS = 340, 384
TOWER = StackFacts(2, 128, 48, 2, 2, 64, gated=False, causal=False)


def small(family: str, **model: Any) -> ModelSpec:
    architecture = clip_architecture(**model)
    spec = tiny_spec(family, architecture=architecture, tower=TOWER, projector=(128, 32, 32))
    return replace(spec, facts=replace(spec.facts, vocabulary=ROWS))


SPECS = {
    "1.5": replace(small("llava", image_seq_length=16), processor={"do_pad": True}),
    "1.6": small("llava_next", image_grid_pinpoints=PINPOINTS),
}
PICTURES = {"1.5": CHATS, "1.6": SHAPES}

#: Names of the model and of the release, prefix by prefix.
RELEASED = [
    ("model.vision_tower.", "model.vision_tower.vision_tower.vision_model."),
    ("model.multi_modal_projector.linear_1.", "model.mm_projector.0."),
    ("model.multi_modal_projector.linear_2.", "model.mm_projector.2."),
    ("model.language_model.", "model."),
]


def released(name: str) -> str:
    for ours, theirs in RELEASED:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def write_tokenizer(folder: Path, old: bool) -> None:
    """Write a tokenizer as LLaVA's releases have: without a list of added tokens where it is old."""
    (folder / "tokenizer.model").write_bytes(piece_model(("[UNUSED]",)))
    config: dict[str, Any] = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_bos_token": True,
        "bos_token": token("<s>"),
        "eos_token": token("</s>"),
        "unk_token": token("<unk>"),
        "pad_token": None,
    }
    if not old:
        names = ("<unk>", "<s>", "</s>")
        config["added_tokens_decoder"] = {str(n): token(name) for n, name in enumerate(names)}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def release_config(version: str, text: Any) -> dict[str, Any]:
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    same += ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "hidden_act")
    config = {key: getattr(text, key) for key in same}
    views = {"image_aspect_ratio": "pad"}
    if version == "1.6":
        views = {
            "image_aspect_ratio": "anyres",
            "image_grid_pinpoints": PINPOINTS,
            "mm_patch_merge_type": "spatial_unpad",
            "rope_theta": 10000.0,
        }
    return config | {
        "architectures": ["LlavaLlamaForCausalLM"],
        "model_type": "llava",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "mm_hidden_size": 128,
        "mm_projector_type": "mlp2x_gelu",
        "mm_use_im_patch_token": False,
        "mm_use_im_start_end": False,
        "mm_vision_select_feature": "patch",
        "mm_vision_select_layer": -2,
        "mm_vision_tower": "openai/clip-vit-tiny-patch7-28",
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "vocab_size": TOKENS,
        **views,
    }


def release(folder: Path, version: str) -> Any:
    """Write a tiny release, of 1.5 without its tower, which goes to a folder `clip`; return the model it holds."""
    folder.mkdir()
    model = random_model(SPECS[version])
    sharpen(model)
    with torch.no_grad():
        for table in (model.model.language_model.embed_tokens, model.lm_head):
            table.weight[TOKENS:] = table.weight[:TOKENS].mean(0)
    tensors = {released(name): value for name, value in model.state_dict().items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:TOKENS].clone()
    if version == "1.5":
        write_pytorch(folder, tensors)
    else:
        names = sorted(tensors)
        for number, part in enumerate((names[::2], names[1::2]), 1):
            shard = {name: tensors[name].contiguous() for name in part}
            save_file(shard, folder / f"model-{number}-of-2.safetensors")
    config = release_config(version, model.config.text_config)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, version == "1.5")
    return model.eval()


def write_pytorch(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write files of PyTorch, with a table that old versions stored, and the tower as a checkpoint of CLIP."""
    inside = "model.vision_tower.vision_tower."
    tower = {
        name.removeprefix(inside): tensors.pop(name) for name in list(tensors) if inside in name
    }
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        torch.save({name: tensors[name] for name in part}, folder / f"pytorch_model-{number}.bin")
    # Beside them as published: the projector once more.
    torch.save({n: t for n, t in tensors.items() if "projector" in n}, folder / "mm_projector.bin")
    clip = folder.parent / "clip"
    clip.mkdir()
    more = {"text_model.final_layer_norm.bias": torch.ones(3), "logit_scale": torch.ones(())}
    more["vision_model.embeddings.position_ids"] = torch.arange(17)
    torch.save({**tower, **more}, clip / "pytorch_model.bin")


def arguments(folder: Path, version: str) -> list[str]:
    tower = ["--tower", str(folder.parent / "clip")] if version == "1.5" else []
    return [*tower, str(folder), str(folder.parent / "out")]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """A release of each version and the model that it holds."""
    folders = {version: tmp_path_factory.mktemp("llava") / "release" for version in SPECS}
    return {version: (folder, release(folder, version)) for version, folder in folders.items()}


def copied(folder: Path, target: Path, **changes: Any) -> Path:
    """Copy a release, with other entries of config.json."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


def refusal(typed: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert conversion.main(typed) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    return line


@pytest.mark.slow
@pytest.mark.parametrize("version", SPECS)
def test_a_converted_release_answers_as_the_model_it_holds(
    sources: dict[str, tuple[Path, Any]], version: str, tmp_path: Path
) -> None:
    folder, model = sources[version]
    assert conversion.main([*arguments(folder, version)[:-1], str(tmp_path / "out")]) == 0
    adapter = load_adapter(replace(SPECS[version], path=tmp_path / "out", weights="trained"))
    for parts in (model, model.model):
        parts.config.image_token_id = adapter.model.config.image_token_id
    assert adapter.model.config.image_token_id == TOKENS
    tensors = dict(adapter.model.named_parameters())
    assert tensors.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(tensors[name], value) for name, value in model.named_parameters())
    inputs = adapter.encode(PICTURES[version])
    with torch.inference_mode():
        expected = model(**inputs).logits
        assert torch.equal(adapter.model(**inputs).logits, expected)
    assert expected.std() > 0.1
    assert (adapter.model.generation_config.eos_token_id, adapter.pad_id) == (2, TOKENS + 1)
    # The same folder describes itself: sizes, views and chat format.
    question = chat("w1", 0)
    with espalier.load(tmp_path / "out", device="cpu").open_adapter() as alone:
        assert type(alone) is type(adapter)
        assert alone.render(question) == adapter.render(question)


def prompt_of(folder: Path) -> str:
    """The prompt of a folder that describes itself."""
    with espalier.load(folder, device="cpu").open_adapter() as adapter:
        return adapter.render(chat("is it?", 0))


@pytest.mark.slow
def test_mistral_is_asked_in_its_own_format(
    sources: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    changes = {"architectures": ["LlavaMistralForCausalLM"], "sliding_window": None}
    folder = copied(sources["1.6"][0], tmp_path / "mistral", **changes)
    assert conversion.main([str(folder), str(tmp_path / "out")]) == 0
    text = json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]
    assert text["model_type"] == "mistral"
    assert prompt_of(tmp_path / "out") == "[INST] <image>\nis it? [/INST]"


def test_yi_is_asked_in_chatml_also_without_a_sentencepiece_model(
    sources: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    folder = copied(sources["1.6"][0], tmp_path / "yi")
    (folder / "tokenizer.model").unlink()
    byte_tokenizer(("<unk>", "<s>", "<|im_end|>", "<|im_start|>")).save_pretrained(folder)
    assert conversion.main([str(folder), str(tmp_path / "out")]) == 0
    system = "<|im_start|>system\nAnswer the questions.<|im_end|>"
    question = "<|im_start|>user\n<image>\nis it?<|im_end|><|im_start|>assistant\n"
    assert prompt_of(tmp_path / "out") == system + question


@pytest.mark.parametrize("version", SPECS)
def test_ids_are_those_of_llavas_code(
    sources: dict[str, tuple[Path, Any]], version: str, tmp_path: Path
) -> None:
    """It encodes the texts between pictures one by one with sentencepiece and puts the begin token first."""
    folder, _ = sources[version]
    assert conversion.main([*arguments(folder, version)[:-1], str(tmp_path / "out")]) == 0
    adapter = load_adapter(replace(SPECS[version], path=tmp_path / "out", weights="trained"))
    pieces = SentencePieceProcessor(str(folder / "tokenizer.model"))
    before, after = adapter.render(chat("what is  the word 树?", 0)).split("<image>")
    ids = adapter.processor.tokenizer(f"{before}<image>{after}").input_ids
    assert ids == [1, *pieces.encode(before), TOKENS, *pieces.encode(after)]


def test_new_rows_are_the_mean_and_never_the_largest() -> None:
    table = torch.randn(5, 8)
    longer = lengthened(table, 7)
    assert torch.equal(longer[:5], table)
    assert torch.allclose(longer[5:], table.mean(0).expand(2, -1))
    assert (torch.randn(100, 8) @ longer.T).argmax(1).max() < 5
    assert torch.equal(lengthened(table, 4), table)


def test_the_tower_is_in_one_place(
    sources: dict[str, tuple[Path, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (old, _), (new, _) = sources["1.5"], sources["1.6"]
    out, clip = str(tmp_path / "out"), str(old.parent / "clip")
    line = refusal([str(old), out], capsys)
    assert "does not hold its vision tower (openai/clip-vit-tiny-patch7-28)" in line
    assert "--tower <folder of openai/clip-vit-tiny-patch7-28>" in line
    assert "no --tower" in refusal(["--tower", clip, str(new), out], capsys)
    other = copied(old, tmp_path / "other", mm_vision_tower="openai/clip-vit-tiny-patch7")
    line = refusal(["--tower", clip, str(other), out], capsys)
    assert "has 4 x 4 patches of 7 x 7 pixels; valid: openai/clip-vit-tiny-patch7\n" in line
    assert "holds no *.safetensors" in refusal(["--tower", str(tmp_path), str(old), out], capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlavaQwenForCausalLM"]}, "architectures='LlavaQwenForCausalLM'"),
        ({"image_aspect_ratio": "anyres"}, "image_aspect_ratio='anyres' with"),
        ({"image_grid_pinpoints": None, "mm_patch_merge_type": "flat"}, "with mm_patch_merge"),
        ({"mm_projector_type": "linear"}, "mm_projector_type='linear'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling="),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"intermediate_size": 50}, "has shape"),
        ({"num_hidden_layers": 4}, "layers.4"),
    ],
)
def test_other_releases_are_refused(
    sources: dict[str, tuple[Path, Any]],
    changes: dict[str, Any],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copied(sources["1.6"][0], tmp_path / "copy", **changes)
    if changes == {"image_aspect_ratio": "anyres"}:
        (folder / "config.json").write_text(
            json.dumps({"architectures": ["LlavaLlamaForCausalLM"], **changes})
        )
    assert words in refusal([str(folder), str(tmp_path / "out")], capsys)
    assert not (tmp_path / "out").exists()


def test_tensors_must_be_those_of_the_model(
    sources: dict[str, tuple[Path, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def changed(name: str, change: Any) -> list[str]:
        folder = copied(sources["1.6"][0], tmp_path / name)
        file = folder / "model-1-of-2.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
        return [str(folder), str(tmp_path / "out")]

    assert "lacks 1 of" in refusal(changed("less", lambda t: t.pop("model.norm.weight")), capsys)
    lora = {"model.layers.0.lora_A": torch.ones(2)}
    assert "lora_A' of the release is unknown" in refusal(
        changed("more", lambda t: t.update(lora)), capsys
    )
    other = load_file(sources["1.6"][0] / "model-2-of-2.safetensors")
    line = refusal(changed("twice", lambda t: t.update([other.popitem()])), capsys)
    assert "model-2-of-2.safetensors' holds" in line
    assert "again; valid: the files of one release" in line


@pytest.mark.parametrize("version", SPECS)
def test_a_release_is_refused_with_the_command(
    sources: dict[str, tuple[Path, Any]], version: str
) -> None:
    folder, _ = sources[version]
    command = f"espalier convert llava {folder} <output>"
    with pytest.raises(UserError, match="LlavaLlamaForCausalLM") as refused:
        model_choice(str(folder))
    assert command in str(refused.value)
    with pytest.raises(UserError, match="LlavaLlamaForCausalLM") as refused:
        load_adapter(replace(SPECS[version], path=folder, weights="trained"))
    assert command in str(refused.value)
    with pytest.raises(UserError, match="LlavaLlamaForCausalLM") as refused:
        check_model(replace(SPECS[version], path=folder, weights="trained"), True, Digests())
    assert command in str(refused.value)
