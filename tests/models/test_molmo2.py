"""Molmo2: pooled patches, prompts of the released template, texts alone, released names and sizes, and refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from espalier.harness.cost.budget import Budget
from espalier.harness.errors import UserError
from espalier.harness.models.build_adapter import random_processor
from espalier.harness.models.chat_media import place_media
from espalier.harness.models.molmo2 import Molmo2Adapter
from espalier.harness.models.view_placement import WHOLE, PictureView
from tests.families import FAMILIES
from tests.families.molmo2 import MOLMO2
from tests.family_runs import Tiny, answered, extended, generated, layers_given, saved
from tests.tiny import Scatter, chat, full_model, load_tiny, model_of, picture, save_tiny

TINY = Tiny("molmo2")


@pytest.mark.parametrize("name", ["molmo2", "molmo2_video"])
def test_tokens_are_made_of_the_patches_that_the_projector_pools(name: str) -> None:
    """A changed patch changes the projection of the tokens that hold it, in a batch of several items."""
    adapter, inputs = Tiny(name).adapter, Tiny(name).inputs()
    (items,) = adapter.items(inputs).values()
    shares = torch.cat([item.share[item.prunable] for item in items])
    source = torch.cat([item.source[item.prunable] for item in items]).masked_fill(shares == 0, -1)
    assert torch.allclose(shares.sum(1), torch.ones(len(shares)))
    pooling = next(value for key, value in inputs.items() if key.endswith("token_pooling"))
    work = [item.work for item in items]
    assert (sum(w.units for w in work), sum(w.pooled for w in work)) == (
        len(pooling),
        pooling.numel(),
    )
    patches = torch.rand(sum(w.tokens for w in work) // 25, 25, 64, dtype=torch.float64)
    with torch.inference_mode():
        before = adapter.projector(patches, pooling).last_hidden_state
        for patch in range(0, patches[..., 0].numel(), 7):
            other = patches.clone()
            other.view(-1, 64)[patch].neg_()
            after = adapter.projector(other, pooling).last_hidden_state
            assert torch.equal((after != before).any(1), (source == patch).any(1))


def test_crops_are_numbered_after_the_whole_picture() -> None:
    adapter = TINY.adapter
    layout = adapter.layout(adapter.encode([chat("w1", picture(0, 90, 90), picture(1, 28, 20))]))
    grid, tile = layout.grid[0], layout.tile[0]
    first = layout.picture[0] == 0
    assert tile[first & (grid[:, 1] == 0)].unique().tolist() == [0]
    assert tile[first & (grid[:, 1] == 1)].unique().tolist() == [1, 2, 3, 4]
    assert tile[~first].unique().tolist() == [0, 1]
    # Both views are the whole picture, stretched.
    assert adapter.view_box(PictureView((90, 90), 1, 5, 5, 4, False)) == WHOLE


USER, ANSWER, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"
LATER = [{"role": "assistant", "content": [{"type": "text", "text": "Two."}]}, *chat("And now?", 1)]


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        (chat("w1"), f"{USER}w1{END}"),
        (chat("a <image> b", 0), f"<|image|>{USER}a  b{END}"),
        (
            [{"role": "user", "content": [*chat("a", 0)[0]["content"], *chat("b")[0]["content"]]}],
            f"<|image|>{USER}a b{END}",
        ),
        # The template puts a blank before earlier answers.
        (
            [*chat("w1", 0), *LATER],
            f"Image 1<|image|>Image 2<|image|>{USER}w1{END} {ANSWER}Two.{END}{USER}And now?{END}",
        ),
    ],
)
def test_prompts_are_those_of_the_released_template(turns: list[dict], text: str) -> None:
    adapter = TINY.adapter
    expected = f"<|im_end|>{text}{ANSWER}"
    assert adapter.render(place_media(turns, adapter.data.placeholders, None)) == expected
    if "<|image|>" not in expected:  # the processor adds no second begin token
        ids = adapter.processor(text=[expected])["input_ids"][0]
        assert adapter.processor.tokenizer.decode(ids) == expected


@pytest.mark.parametrize("backend", ["drop", "emulate"])
@pytest.mark.parametrize("where", [("prefix",), (2,)])
@pytest.mark.parametrize("name", ["molmo2", "molmo2_video"])
def test_closed_gaps_renumber_tables_and_pairs_are_those_of_the_masks(
    name: str, where: tuple[Any, ...], backend: Any
) -> None:
    """Against one forward with masks and tables by hand in each layer, for the answer, too."""
    adapter, inputs = Tiny(name).adapter, Tiny(name).inputs(1)
    first = 0 if where == ("prefix",) else where[0]
    most = Budget("kept", 0.6)
    options = {"backend": backend, "positions": "renumbered"}
    batch = generated(adapter, inputs, Scatter(where), most, **options)
    longer = extended(inputs, batch.ids[:, :-1])
    length, visual = longer["input_ids"].shape[1], adapter.layout(inputs).visual[0]
    marked = torch.zeros(length, dtype=torch.bool).scatter(0, visual, True)
    alive = ~marked
    alive[visual[batch.records[0].origin]] = True
    sees = FAMILIES[name].sees(marked, 0)

    def by_hand(layer: int) -> Any:
        mask, places = sees, torch.arange(length)
        if layer >= first:
            mask = (sees & alive) | torch.eye(length, dtype=torch.bool)
            places = (alive.cumsum(0) - 1).clamp(min=0)
        angle = places[:, None].double() / 1e4 ** (torch.arange(8) / 8)
        tables = tuple(table.repeat(1, 2)[None] for table in (angle.cos(), angle.sin()))
        return {"attention_mask": mask[None, None], "position_embeddings": tables}

    with layers_given(adapter, by_hand), torch.inference_mode():
        logits = adapter.model(**longer, use_cache=False).logits
    prompt = inputs["input_ids"].shape[1]
    assert (batch.logits - logits[:, prompt - 1 :]).abs().max() < 1e-6
    kept = sees[:prompt, :prompt] & alive[:prompt, None] & alive[:prompt]
    pairs = int(sees[:prompt, :prompt].sum())
    assert batch.records[0].full_pairs == (pairs,) * 5
    assert batch.records[0].pairs == (*first * (pairs,), *(5 - first) * (int(kept.sum()),))


#: Names of the release's files, the numbers of layers left out, without `.weight` and `.bias`.
NAMES = {
    "lm_head",
    *(
        f"model.transformer.{name}"
        for name in (
            *("ln_f", "wte.embedding", "wte.new_embedding"),
            *("blocks.attn_norm", "blocks.ff_norm", "blocks.mlp.ff_out", "blocks.mlp.ff_proj"),
            *(f"blocks.self_attn.{part}" for part in ("att_proj", "attn_out", "k_norm", "q_norm")),
        )
    ),
    *(
        f"model.vision_backbone.{name}"
        for name in (
            *(f"image_pooling_2d.w{letter}" for letter in "qkvo"),
            *(f"image_projector.w{number}" for number in (1, 2, 3)),
            *("image_vit.patch_embedding", "image_vit.positional_embedding"),
            *(f"image_vit.transformer.resblocks.attention.w{letter}" for letter in "qkvo"),
            *(f"image_vit.transformer.resblocks.feed_forward.w{number}" for number in (1, 2)),
            *(f"image_vit.transformer.resblocks.{norm}_norm" for norm in ("attention", "ffn")),
        )
    ),
}


def test_a_release_loads_under_its_own_names_and_keys(tmp_path: Path) -> None:
    """The library writes tensors under the release's names; keys of config.json are changed to the release's here."""
    folder = copytree(saved("molmo2"), tmp_path / "release")
    names = load_file(folder / "model.safetensors").keys()
    assert {re.sub(r"\.\d+|\.weight$|\.bias$", "", name) for name in names} == NAMES
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text, vision = config["text_config"], config.pop("vision_config")
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    text["qkv_bias"], text["layer_norm_eps"] = text.pop("attention_bias"), text.pop("rms_norm_eps")
    text["rope_scaling_layers"] = text["rope_scaling"] = None
    vision["image_default_input_size"] = vision.pop("image_size")
    vision["image_patch_size"] = vision.pop("patch_size")
    vision["image_num_pos"] = vision.pop("num_position_embeddings")
    # Its config.json counts two layers more than its files hold.
    config["vit_config"] = {**vision, "num_hidden_layers": 4, "model_type": "molmo2"}
    del config["adapter_config"]["vision_feature_layer"]
    config["adapter_config"] |= {"vit_layers": [-3, -4], "model_type": "molmo2"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    adapter = load_tiny(MOLMO2, folder)
    expected = answered(TINY.adapter, TINY.inputs())[1]
    assert torch.equal(answered(adapter, TINY.inputs())[1], expected)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "parameters"), [("molmo2_4b", 4_850_869_200), ("molmo2_8b", 8_661_703_120)]
)
def test_the_config_file_builds_the_released_architecture(name: str, parameters: int) -> None:
    """As many parameters as in the 4B release's index, and as in 34.66 GB of single precision of the 8B release."""
    spec = model_of(f"model={name}")
    assert sum(parameter.numel() for parameter in full_model(spec).parameters()) == parameters
    fewer = random_processor(Molmo2Adapter, replace(spec, processor={"max_crops": 1}))
    assert fewer.image_processor.get_number_of_image_patches(480, 640) == 2 * 14**2


def test_what_is_not_proved_is_refused(tmp_path: Path) -> None:
    adapter = TINY.adapter
    line = "pictures and videos in one batch: Molmo2ForConditionalGeneration"
    with pytest.raises(UserError, match=re.escape(line)):
        adapter.encode(list(chain(FAMILIES["molmo2"].chats, FAMILIES["molmo2_video"].chats)))
    with pytest.raises(UserError, match="see one another, which needs a mask; valid: sdpa, eager"):
        Molmo2Adapter.check_settings(replace(MOLMO2, attention="flash_attention_2"))
    with pytest.raises(UserError, match=re.escape("model.processor.max_crops=0")):
        Molmo2Adapter.adopt_processor(
            adapter.processor, replace(MOLMO2, processor={"max_crops": 0})
        )
    for changes in ({"norm_after": True}, {"qk_norm_type": "olmo"}, {"rope_scaling_layers": [0]}):
        text = {**MOLMO2.architecture["text"], **changes}
        spec = replace(MOLMO2, architecture={**MOLMO2.architecture, "text": text})
        folder = save_tiny(spec, tmp_path / next(iter(changes)))
        with pytest.raises(UserError, match=r"OLMo's layers .* valid: releases with Qwen3"):
            load_tiny(spec, folder)
