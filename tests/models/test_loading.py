"""Checkpoints that are missing, incomplete or different from the config file are refused in one line."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from PIL import Image
from safetensors.torch import load, save_file

import espalier
from espalier.harness.cost.budget import Budget
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.specs.run_spec import ModelSpec
from tests.refused import refused
from tests.tiny import CHATS, LLAVA, Scatter, chat, load_llava, save_llava


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return save_llava(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def spec_of(folder: Path | None, **changes) -> ModelSpec:
    return replace(LLAVA, path=folder, weights="trained", **changes)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load((folder / "model.safetensors").read_bytes())


def rewrite(folder: Path, change) -> None:
    tensors = tensors_of(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_directory_names_the_key(tmp_path: Path) -> None:
    line = refused(load_adapter, spec_of(tmp_path / "nowhere"))
    assert line.startswith("model.path=")
    assert "holds no model: it does not exist" in line


def test_a_hub_id_without_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = refused(load_adapter, spec_of(None, hub="nobody/nothing", revision="main"))
    assert "nobody/nothing" in line
    assert "model.path=<dir>" in line


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda t: t.pop(next(k for k in t if k.endswith("1.mlp.up_proj.weight"))), "missing keys"),
        (lambda t: t.update({"model.surplus.weight": torch.zeros(3)}), "unexpected keys"),
        (
            lambda t: t.update(
                {next(k for k in t if k.endswith("0.mlp.up_proj.weight")): torch.zeros(7, 32)}
            ),
            "mismatched keys",
        ),
    ],
)
def test_tensors_must_be_those_of_the_architecture(folder: Path, change, kind: str) -> None:
    shapes = {(name, tensor.shape) for name, tensor in tensors_of(folder).items()}
    rewrite(folder, change)
    changed = shapes ^ {(name, tensor.shape) for name, tensor in tensors_of(folder).items()}
    line = refused(load_adapter, spec_of(folder))
    assert f"1 {kind}" in line
    assert changed.pop()[0].rpartition("model.")[2] in line.rpartition("first is ")[2]


def test_a_torn_weight_file_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "weight file 'model.safetensors' is damaged" in refused(load_adapter, spec_of(folder))


def test_another_model_is_refused_and_the_conversion_named(folder: Path) -> None:
    command = "python -m some.conversion <in> <out>"
    facts = replace(LLAVA.facts, text=replace(LLAVA.facts.text, layers=4))
    line = refused(load_adapter, spec_of(folder, facts=facts, conversion=command))
    assert "model.facts.text.layers=4, the loaded model has 5" in line
    assert command in line
    (folder / "config.json").write_text(json.dumps({"model_type": "internvl_chat"}))
    assert command in refused(load_adapter, spec_of(folder, conversion=command))


def test_a_checkpoint_without_processor_is_refused(folder: Path) -> None:
    for file in (*folder.glob("*process*"), *folder.glob("token*")):
        file.unlink()
    assert "has no tokenizer_config.json" in refused(load_adapter, spec_of(folder))


# ---------------------------------------------------------------- where the model is


@pytest.mark.slow
def test_a_model_spread_by_accelerate_answers_as_one_in_one_place(saved: Path, tmp_path) -> None:
    """Its hooks move arguments around each module; half of the decoder's layers live on the disk here."""
    single, spread = load_llava(saved, "float32"), load_llava(saved, "float32")
    core = spread.model.model
    stack = core.language_model
    places = {
        "lm_head": "cpu",
        **{f"model.{name}": "cpu" for name, part in core.named_children() if part is not stack},
        **{f"model.language_model.{name}": "cpu" for name, _ in stack.named_children()},
        **{
            f"model.language_model.layers.{number}": "cpu" if number < 2 else "disk"
            for number in range(len(stack.layers))
        },
    }
    del places["model.language_model.layers"]
    spread.model = dispatch_model(
        spread.model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True
    )
    generation = {"max_new_tokens": 4, "do_sample": False, "output_logits": True}
    for where in (("prefix",), (1,), (1, 3)):
        answers = []
        for adapter in (single, spread):
            with Session(adapter, Scatter(where), Budget("kept", 0.6)) as session:
                answers.append(session.generate(adapter.encode(CHATS), **generation))
        assert torch.equal(answers[0].logits, answers[1].logits)


def test_device_map_auto_loads_and_answers(saved: Path) -> None:
    adapter = load_adapter(spec_of(saved, device_map="auto"))
    plain = load_adapter(spec_of(saved))
    with torch.inference_mode():
        ids = [
            loaded_adapter.model.generate(
                **loaded_adapter.encode(CHATS), max_new_tokens=4, do_sample=False
            )
            for loaded_adapter in (adapter, plain)
        ]
    assert torch.equal(*ids)


# ---------------------------------------------------------------- chats


def test_llava_pads_to_a_square_as_the_paper_does(saved: Path) -> None:
    """A bar at the left edge of a wide image survives padding; the centre crop cuts it off."""
    wide = Image.new("RGB", (112, 28), (0, 0, 0))
    wide.paste((255, 255, 255), (0, 0, 14, 28))
    padded = load_adapter(spec_of(saved, processor={"do_pad": True}))
    cropped = load_adapter(spec_of(saved))
    message = [chat("w1", wide)]
    pixels = padded.encode(message)["pixel_values"][0]
    assert pixels.shape == (3, 28, 28)
    # 112 x 28 becomes a square of 112, the image in its middle quarter; the bar is an eighth of its width.
    bar, rest = pixels[:, 11:17, :3], pixels[:, 11:17, 5:]
    assert bar.min() > rest.max()
    mean = torch.tensor(padded.processor.image_processor.image_mean)
    fill = (torch.floor(mean * 255) / 255 - mean) / torch.tensor(
        padded.processor.image_processor.image_std
    )
    assert torch.allclose(pixels[:, 0, 0], fill, atol=0.02)
    lost = cropped.encode(message)["pixel_values"][0]
    assert torch.equal(lost, lost[:, :1, :1].expand_as(lost))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "w1"}]}], "no image and no video"),
        (chat("w1 " * 2000, 1), "tokens, model='tiny' takes fewer than 2048"),
        (
            [{"role": "user", "content": [{"type": "video", "video": "x.mp4"}]}],
            "takes images only",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "image": b"\x89PNG torn"}]}],
            "chat 1 of the batch",
        ),
    ],
    ids=["no image", "too long", "video", "torn image"],
)
def test_a_chat_that_cannot_be_read_is_named(saved: Path, message, words: str) -> None:
    adapter = load_adapter(spec_of(saved, media="required"))
    with pytest.raises(UserError, match="chat 1 of the batch") as caught:
        adapter.encode([chat("w1", 0), message])
    assert words in str(caught.value)


def test_a_prompt_without_placeholder_is_refused(saved: Path) -> None:
    adapter = load_adapter(spec_of(saved))
    inputs = adapter.encode(CHATS)
    inputs["input_ids"][1, -30:] = 5
    with pytest.raises(UserError, match=r"chat 1 of the batch|no placeholder"):
        adapter.layout(inputs)
    inputs["input_ids"][:] = 5
    assert "4 images or videos of the batch have no placeholder" in refused(adapter.layout, inputs)


# ------------------------------------------------------------------ first releases


ORIGINAL = [
    ("llava", "LlavaLlamaForCausalLM", "llava-1.5-7b-hf"),
    ("llava_llama", "LlavaLlamaForCausalLM", "llava-1.5-7b-hf"),
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
