"""Classes of transformers without a file here: proved at loading, limited to what was proved, or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import espalier
from espalier.harness.cost.budget import Budget
from espalier.harness.errors import UserError
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import build_adapter, read_checkpoint
from espalier.harness.models.families import GENERIC, MODEL_TYPES
from espalier.harness.models.generic import NOWHERE, GenericAdapter
from espalier.harness.models.generic_proof import prove
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.run_spec import AnswerSpec, Backend, EngineSpec, MethodSpec
from run import main
from tests.models.unlisted_models import UNLISTED, save_model, save_unlisted, text
from tests.refused import refused
from tests.tiny import LLAVA, chat, picture

#: Why a class is refused.
REFUSED = {
    "gemma3": "masks of its own",
    "gemma4": "decoder layer 0 is 'sliding_attention'",
    "paligemma": "masks of its own",
    "paligemma2": "decoder layer 0 is 'sliding_attention'",
}

#: Why methods may not act inside the encoder of the other classes; everywhere else but at NOWHERE they may.
TOWERS = {
    "vipllava": "dropping in block 0 of its encoder changes logits",
    "mistral3": "its PixtralVisionModel has no list of pre-norm blocks",
    "lighton_ocr": "its PixtralVisionModel has no list of pre-norm blocks",
    "idefics3": "80 patches of its encoder become 20 tokens",
    "aya_vision": "80 patches of its encoder become 20 tokens",
    "deepseek_vl": None,
    "ovis2": "its Ovis2VisionModel has no list of pre-norm blocks",
    "llava_next_video": "80 patches of its encoder become 70 tokens",
    "video_llama_3": "patches of its encoder become 24 tokens",
    "qianfan_ocr": "its QianfanOCRVisionModel has no list of pre-norm blocks",
    "cohere2_vision": "80 patches of its encoder become 20 tokens",
    "glm_ocr": "its GlmOcrVisionModel has no list of pre-norm blocks",
    "perception_lm": "its TimmWrapperModel has no list of pre-norm blocks",
    "janus": None,
    "aria": "25 patches of its encoder become 8 tokens",
}


def load(name: str, folder: Path) -> GenericAdapter:
    """Return the adapter of a saved checkpoint, as a folder on the command line is loaded."""
    spec = replace(
        LLAVA, name=name, path=folder, weights="trained", adapter="none", architecture={}
    )
    spec = read_checkpoint(spec, "model")
    assert spec.adapter == "generic"
    return build_adapter(GenericAdapter, spec)


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_is_refused_with_what_failed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODEL_TYPES, "gemma3", GENERIC)  # as if it had no file
    line = refused(load, name, save_unlisted(name, tmp_path))
    assert line.startswith(f"model={name}: ")
    assert REFUSED[name] in line


def test_features_in_another_order_are_noticed(tmp_path: Path) -> None:
    adapter = load("mistral3", save_unlisted("mistral3", tmp_path))
    with pytest.raises(UserError, match=r"features of get_image_features are not what enters"):
        prove(adapter, lambda inputs: adapter.features_of(inputs).flip(0), "model=m")


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
    assert "ratio 0 (loop) changes logits" in refused(
        prove, adapter, adapter.features_of, "model=m"
    )


@pytest.mark.parametrize("method", ["divprune", "fastv", "tome", "visionzip"])
def test_a_run_acts_where_its_class_is_proved(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_unlisted("mistral3", tmp_path / "model")
    command = [f"model={folder}", f"store={tmp_path}", "limit=1", "engine.paired=0", "json=true"]
    capsys.readouterr()
    code = main([*command, f"method={method}", "ratio=0.5"])
    printed = capsys.readouterr()
    where = {"tome": "tower", "visionzip": "vision"}.get(method)
    if where is None:
        row = json.loads(printed.out.strip().splitlines()[-1])
        assert (code, row["tokens"]["kept_final"]) == (0, row["tokens"]["visual"] / 2)
        assert row["flops"]["tower"] is None
    else:
        reason = TOWERS["mistral3"] if where == "tower" else NOWHERE[where]
        assert code == 2
        assert (
            f"acts at {where}, and the model's class, which has no file here, was not proved there: {reason}"
            in printed.err
        )


#: A method of each kind of site.
METHODS = {"prefix": "divprune", "layer": "fastv", "cache": "snapkv", "tower": "tome"}


def answer(adapter: Adapter, method: str, backend: Backend, inputs: Mapping[str, Any]) -> Tensor:
    """Return the logits (1, 2, V) of an answer with half of the tokens."""
    built = build_method(method, {})
    spec = AnswerSpec(
        adapter.spec, MethodSpec(method), Budget("kept", 0.5), EngineSpec(backend=backend)
    )
    with kind_of(built, spec).open(spec, adapter, built) as opened:
        settings = {"max_new_tokens": 2, "output_logits": True, "do_sample": False}
        return opened.generator.generate(inputs, ["0"], **settings).logits


@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", TOWERS)
def test_a_class_is_proved_site_by_site(name: str, tmp_path: Path) -> None:
    """A picture of several tiles is one item, and methods act where the class is proved and nowhere else."""
    model = espalier.load(save_unlisted(name, tmp_path), device="cpu")
    sizes = ((28, 28), (56, 28), (28, 84), (84, 56))
    with model.open_adapter() as adapter:
        unproved = adapter.facts.unproved
        assert {*unproved} - {"tower"} == {*NOWHERE}
        assert ("tower" in unproved) == (TOWERS[name] is not None)
        assert (TOWERS[name] or "") in unproved.get("tower", "")
        alone = [
            adapter.layout(adapter.encode([chat("What?", picture(0, *size))])) for size in sizes
        ]
        parts = [{"type": "image", "image": picture(0, *size)} for size in sizes]
        words = [{"type": "text", "text": f"w{n} and:"} for n in range(len(sizes))]
        mixed = [part for pair in zip(parts, words, strict=True) for part in pair]
        turns = [{"role": "user", "content": mixed}]
        inputs = adapter.encode([turns])
        layout = adapter.layout(inputs)
        assert sum(layout.counts) == len(adapter.features_of(inputs))
        assert [int(single.picture.max()) for single in alone] == [0] * len(sizes)
        counts = torch.bincount(layout.picture[0]).tolist()
        assert counts == [single.counts[0] for single in alone]
        for where, method in METHODS.items():
            if where in unproved:
                with pytest.raises(
                    UserError, match=f"acts at {where}, and .* was not proved there"
                ):
                    answer(adapter, method, "drop", inputs)
                continue
            dropped = answer(adapter, method, "drop", inputs)
            if where != "cache":  # compressors only evict
                emulated = answer(adapter, method, "emulate", inputs)
                torch.testing.assert_close(dropped, emulated, rtol=0, atol=1e-3)
    with espalier.apply(model, "divprune", ratio=0.5) as pruned:
        for size, single in zip(sizes, alone, strict=True):
            reply = pruned.ask(picture(0, *size), "What?", max_new_tokens=2)
            assert (reply.visual, len(reply.kept_indices)) == (single.counts[0], reply.kept)
            assert "have no place in the picture" in refused(reply.show)
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


@pytest.mark.sampled
@pytest.mark.parametrize("stack", STACKS)
def test_a_text_stack_of_another_shape_is_one_line_at_loading(stack: str, tmp_path: Path) -> None:
    folder = save_stack(tf.LlavaConfig, stack, tmp_path / "model")
    line = refused(espalier.load, folder, device="cpu", dtype="float32")
    assert line.startswith("model=")
    assert STACKS[stack][1] in line


@pytest.mark.parametrize("stack", ["deepseek_v3", "granitemoe"])
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
