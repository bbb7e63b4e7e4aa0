"""Classes of transformers without a file here: proved at loading, limited to what was proved, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import wraps
from pathlib import Path

import pytest
import torch
import transformers as tf

import espalier
from espalier.harness.errors import UserError
from espalier.harness.models.build_adapter import build_adapter, read_checkpoint
from espalier.harness.models.families import GENERIC, MODEL_TYPES
from espalier.harness.models.generic import GenericAdapter
from espalier.harness.models.generic_proof import prove
from run import main
from tests.models.unlisted_models import UNLISTED, save_model, save_unlisted, text
from tests.tiny import LLAVA, chat, picture

#: Why a class is refused.
REFUSED = {"gemma3": "masks of its own"}


def load(name: str, folder: Path) -> GenericAdapter:
    """Return the adapter of a saved checkpoint, as a folder on the command line is loaded."""
    spec = replace(
        LLAVA, name=name, path=folder, weights="trained", adapter="none", architecture={}
    )
    spec = read_checkpoint(spec, "model")
    assert spec.adapter == "generic"
    adapter: GenericAdapter = build_adapter(GenericAdapter, spec)
    return adapter


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [name for name in UNLISTED if name not in REFUSED])
def test_classes_without_a_file_are_proved(name: str, tmp_path: Path) -> None:
    adapter = load(name, save_unlisted(name, tmp_path))
    inputs = adapter.encode([chat("What?", picture(0, 56, 40)), chat("And what is this here?", 1)])
    layout = adapter.layout(inputs)
    units = adapter.features_of(inputs)
    assert sum(layout.counts) == len(units)
    assert adapter.facts.sites == ("prefix",)


def test_a_class_is_refused_with_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODEL_TYPES, "gemma3", GENERIC)  # as if it had no file
    with pytest.raises(UserError, match=r"Gemma3ForConditionalGeneration.* masks of its own"):
        load("gemma3", save_unlisted("gemma3", tmp_path))


def test_features_in_another_order_are_noticed(tmp_path: Path) -> None:
    adapter = load("mistral3", save_unlisted("mistral3", tmp_path))
    with pytest.raises(UserError, match=r"features of get_image_features are not what enters"):
        prove(adapter, lambda inputs: adapter.features_of(inputs).flip(0))


def test_a_head_that_the_engine_does_not_see_is_noticed(tmp_path: Path) -> None:
    """The class scales its logits after the head, in code that the engine's loop does not run."""
    adapter = load("mistral3", save_unlisted("mistral3", tmp_path))
    forward = adapter.model.forward

    @wraps(forward)
    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    adapter.model.forward = scaled
    with pytest.raises(UserError, match=r"ratio 0 \(loop\) changes logits"):
        prove(adapter, adapter.features_of)


def test_a_run_acts_before_the_decoder_and_nowhere_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_unlisted("mistral3", tmp_path / "model")
    command = [f"model={folder}", f"store={tmp_path}", "limit=1", "engine.paired=0", "json=true"]
    assert main([*command, "method=divprune", "ratio=0.5"]) == 0
    row = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert row["tokens"]["kept_final"] == row["tokens"]["visual"] / 2
    assert row["flops"]["tower"] is None
    assert main([*command, "method=fastv", "ratio=0.5"]) == 2
    assert (
        "acts at layer, and model='model', a class without a file here" in capsys.readouterr().err
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [name for name in UNLISTED if name not in REFUSED])
def test_a_picture_of_several_tiles_is_one_item(name: str, tmp_path: Path) -> None:
    model = espalier.load(save_unlisted(name, tmp_path), device="cpu")
    sizes = ((28, 28), (56, 28), (28, 84), (84, 56))
    with model.open_adapter() as adapter:
        alone = [
            adapter.layout(adapter.encode([chat("What?", picture(0, *size))])) for size in sizes
        ]
        parts = [{"type": "image", "image": picture(0, *size)} for size in sizes]
        words = [{"type": "text", "text": f"w{n} and:"} for n in range(len(sizes))]
        mixed = [part for pair in zip(parts, words, strict=True) for part in pair]
        turns = [{"role": "user", "content": mixed}]
        layout = adapter.layout(adapter.encode([turns]))
    assert [int(one.picture.max()) for one in alone] == [0] * len(sizes)
    counts = torch.bincount(layout.picture[0]).tolist()
    assert counts == [one.counts[0] for one in alone]
    with espalier.apply(model, "divprune", ratio=0.5) as pruned:
        for size, one in zip(sizes, alone, strict=True):
            answer = pruned.ask(picture(0, *size), "What?", max_new_tokens=2)
            assert (answer.visual, len(answer.kept_indices)) == (one.counts[0], answer.kept)
            with pytest.raises(UserError, match="have no place in the picture"):
                answer.show()
        assert pruned.ask(turns, max_new_tokens=2).visual == sum(counts)


#: Latent attention, as in Kimi-VL and DeepSeek-VL2.
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

#: Text stacks that the engine does not know, and what it misses.
STACKS = {
    "deepseek_v3": (
        {**LATENT, **EXPERTS, "v_head_dim": 8, "n_group": 1, "topk_group": 1},
        "qkv_proj",
    ),
    "granitemoe": ({"num_local_experts": 4}, "no attribute 'mlp'"),
    "llama4_text": ({"intermediate_size_mlp": 48, "num_local_experts": 4}, "no attribute 'mlp'"),
    "falcon_h1": ({}, "no attribute 'mlp'"),
    "aria_text": ({"moe_num_experts": 4}, "no attribute 'gate'"),
    "gpt_neox": ({}, "has no o_proj or out_proj"),
    "jamba": ({"num_experts": 2, "mamba_d_state": 4}, "has no self_attn or attention"),
    "cohere2": ({}, "decoder layer 0 is 'sliding_attention'"),
    "exaone4": ({}, "decoder layer 0 is 'sliding_attention'"),
    "mistral": ({"sliding_window": 8}, "decoder layer 0 is 'sliding_attention'"),
    "gemma4_text": (
        {
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 8,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        },
        "families with a file in harness/models",
    ),
    "gemma2": ({"query_pre_attn_scalar": 8}, "; valid: attention=eager"),
}


def save_stack(outer: type[tf.PreTrainedConfig], stack: str, folder: Path) -> Path:
    """Save a tiny model of an outer class around a text stack."""
    entry = UNLISTED["vipllava"]
    arguments = {**entry.arguments, "text_config": text(stack, **STACKS[stack][0])}
    if outer is tf.LlavaConfig:
        arguments.pop("vision_feature_layers")
    return save_model(replace(entry, config=outer, arguments=arguments), folder)


@pytest.mark.parametrize("stack", STACKS)
def test_a_text_stack_of_another_shape_is_one_line_at_loading(stack: str, tmp_path: Path) -> None:
    folder = save_stack(tf.LlavaConfig, stack, tmp_path / "model")
    with pytest.raises(UserError) as refusal:
        espalier.load(folder, device="cpu", dtype="float32")
    line = str(refusal.value)
    assert line.startswith("model=")
    assert STACKS[stack][1] in line
    assert "\n" not in line


@pytest.mark.parametrize("stack", ["deepseek_v3", "aria_text", "granitemoe"])
def test_a_run_of_such_a_folder_ends_in_one_line(
    stack: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_stack(tf.VipLlavaConfig, stack, tmp_path / "model")
    capsys.readouterr()
    assert main([f"model={folder}", "benchmark=seedling_rec", f"store={tmp_path / 's'}"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert STACKS[stack][1] in line or "it lacks an MLP in each layer" in line


def test_a_processor_that_takes_pictures_one_by_one_is_named(tmp_path: Path) -> None:
    adapter = load("mistral3", save_unlisted("mistral3", tmp_path))

    def flat(text: list[str], images: object, **options: object) -> object:
        raise ValueError("Nested images are not supported.")

    flat.tokenizer, flat.image_processor = (
        adapter.processor.tokenizer,
        adapter.processor.image_processor,
    )
    flat.chat_template = adapter.processor.chat_template
    flat.apply_chat_template = adapter.processor.apply_chat_template
    adapter.processor = flat
    with pytest.raises(UserError, match=r"takes picture 0 \(\d+x\d+\) alone, and not in a list"):
        adapter.encode([chat("What?", 0)])
