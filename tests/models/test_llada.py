"""LaViDa and LLaDA-V: loaded from releases, and equal to a slow implementation of their descriptions."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from espalier.harness.config.composer import compose_section
from espalier.harness.config.model_section import model_spec
from espalier.harness.cost.budget import Budget
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.architectures.llava_releases import LLADA_RENAMES, planes
from espalier.harness.models.build_adapter import build_adapter, random_processor
from espalier.harness.models.families import ADAPTERS
from espalier.harness.models.random_weights import byte_tokenizer
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.run_spec import ModelSpec
from espalier.harness.tools.benchmarks.checkpoint_prompts import SEEN, compare_tokens
from tests.families.llada import (
    DENOISING,
    PLANES,
    SIDES,
    adapter_of,
    released,
    saved_release,
    tensors_of,
)
from tests.models.llada_reference import Reference, pixels
from tests.tiny import chat, full_model, load_tiny, picture

FAMILIES = list(SIDES)
MODELS = {
    "llada_v": "llada_v_8b",
    "lavida": "lavida_llada_8b",
    "lavida_dream": "lavida_dream_7b",
}
#: Of the text stack: bytes, as the indices of LLaDA-V and of Qwen2.5 7B state them, layers, and tensors of a layer.
STACKS = {
    **dict.fromkeys(("llada_v", "lavida"), (16_031_162_368, 32, 9)),
    "lavida_dream": (15_231_233_024, 28, 12),
}
#: Width and height: shapes that need padding, one that fits into a single tile, larger ones than any plane.
SIZES = [(50, 40), (40, 70), (31, 20), (90, 200), (200, 90), (35, 35), (56, 84)]


@cache
def reference_of(family: str) -> Reference:
    return Reference(tensors_of(family), family != "llada_v", SIDES[family], 7, max_views=2)


@cache
def real_spec(family: str) -> ModelSpec:
    section = compose_section("model", MODELS[family])
    return model_spec({**section, "weights": "random", "device": "cpu"})


def shape_of(family: str, size: Tensor) -> tuple[int, int]:
    high, wide = size.tolist()
    return pixels(picture(0, wide, high), PLANES[family], SIDES[family])[1]


@cache
def expected(name: str) -> list[Tensor]:
    """The embeddings of each row's prompt, from the encoded ids and pixels by the slow reference."""
    family, adapter = DENOISING[name].spec.adapter, adapter_of(name)
    reference = reference_of(family)
    inputs = adapter.encode(DENOISING[name].chats)
    config = adapter.model.config
    actual: list[Tensor] = []
    if "pixel_values" in inputs:
        single = [n == 1 for n in inputs["batch_num_images"].tolist() for _ in range(n)]
        for pixels, size, lone in zip(
            inputs["pixel_values"], inputs["image_sizes"], single, strict=True
        ):
            shape = shape_of(family, size) if lone else (0, 0)
            bare = not lone and "several_pictures" in adapter.spec.processor
            views = pixels[: 1 + shape[0] * shape[1]]
            actual.append(reference.image(views, tuple(size.tolist()), shape, bare))
    actual += [reference.video(pixels) for pixels in inputs.get("pixel_values_videos", ())]
    features = torch.cat(actual)
    rows, first = [], 0
    for ids, valid in zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True):
        pixels = ids[valid]
        embedded = reference.words(pixels.tolist())
        places = (pixels == config.image_token_id) | (pixels == config.video_token_id)
        embedded[places] = features[first : first + int(places.sum())]
        first += int(places.sum())
        rows.append(embedded)
    assert first == len(features)
    return rows


@cache
def expected_logits(name: str) -> list[Tensor]:
    reference = reference_of(DENOISING[name].spec.adapter)
    return [reference.text(row) for row in expected(name)]


def close(actual: Tensor, wanted: Tensor, bound: float = 1e-10) -> None:
    assert actual.shape == wanted.shape
    assert float((actual - wanted).abs().max() / wanted.abs().max()) < bound


# ------------------------------------------------------------------ the model against its description


@pytest.mark.sampled
@pytest.mark.parametrize("name", list(DENOISING))
def test_the_prompt_in_front_of_the_decoder_is_the_one_of_the_description(name: str) -> None:
    adapter = adapter_of(name)
    inputs = adapter.encode(DENOISING[name].chats)
    with Session(adapter, build_method("none", {}), Budget("kept", 0.0)) as session:
        prompt = session.prompt(inputs)
    embedded = prompt.arguments["inputs_embeds"]
    for row, valid, wanted in zip(
        embedded, inputs["attention_mask"].bool(), expected(name), strict=True
    ):
        close(row[valid], wanted)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", list(DENOISING))
def test_every_token_sees_every_other_and_no_padding(name: str, attention: str) -> None:
    """A padded batch through the whole model, and embeddings alone through the text stack.

    The library's rotary tables, norms and eager softmax are fp32 in a model of fp64, too.
    """
    adapter = adapter_of(name, attention=attention)
    inputs = adapter.encode(DENOISING[name].chats)
    wanted = expected_logits(name)
    with torch.no_grad():
        logits = adapter.model(**inputs).logits
        for row, valid, item in zip(logits, inputs["attention_mask"].bool(), wanted, strict=True):
            close(row[valid], item, 1e-5)
        states = adapter.decoder(inputs_embeds=expected(name)[0][None]).last_hidden_state
        close(adapter.model.lm_head(states)[0], wanted[0], 1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("name", list(DENOISING))
def test_units_and_shares_make_the_tokens(name: str) -> None:
    """Each visual token is the stated mixture of projected patches, and each has its place in a grid."""
    adapter, family = adapter_of(name), DENOISING[name].spec.adapter
    inputs = adapter.encode(DENOISING[name].chats)
    layout = adapter.layout(inputs)
    views: list[Tensor] = []
    if "pixel_values" in inputs:
        single = [n == 1 for n in inputs["batch_num_images"].tolist() for _ in range(n)]
        for pixels, size, lone in zip(
            inputs["pixel_values"], inputs["image_sizes"], single, strict=True
        ):
            shape = shape_of(family, size) if lone else (0, 0)
            views += reference_of(family).views(pixels[: 1 + shape[0] * shape[1]])
    for pixels in inputs.get("pixel_values_videos", ()):
        views += reference_of(family).views(pixels)
    units = torch.cat(views)
    assert sum(work.units for work in layout.work) == len(units)
    lengths = inputs["attention_mask"].sum(1)
    for row, wanted in enumerate(expected(name)):
        visual = slice(layout.counts[row])
        places = layout.visual[row, visual] - (layout.valid.shape[1] - int(lengths[row]))
        parts = units[layout.source[row, visual]]
        if layout.share is not None:
            parts = parts * layout.share[row, visual].unsqueeze(-1)
        else:
            assert parts.shape[1] == 1
        close(parts.sum(1), wanted[places], 1e-6)  # shares are fp32
        for image, view in layout.grid[row, visual, :2].unique(dim=0).tolist():
            grid = layout.grid[row, visual]
            cells = grid[(grid[:, 0] == image) & (grid[:, 1] == view), 2:]
            high, wide = (cells.max(0).values + 1).tolist()
            assert torch.equal(cells, torch.cartesian_prod(torch.arange(high), torch.arange(wide)))


def test_square_picture_of_lavida_takes_as_many_tokens_as_its_paper_counts() -> None:
    """196 of the whole, 28 rows of 28 and a newline each; the paper counts 980, without newlines."""
    processor = random_processor(ADAPTERS.load("lavida"), real_spec("lavida"))
    ids = processor(images=[[picture(0, 900, 900)]], text=["<image>"], return_tensors="pt")
    assert int((ids["input_ids"] == processor.image_token_id).sum()) == 196 + 28 * 29
    assert real_spec("lavida").facts.visual_tokens == 196 + 28 * 28


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ((384, 384), 729 + 27 * 28),
        ((768, 768), 729 + 54 * 55),
        ((1536, 1536), 729 + 54 * 55),  # 108 x 108 shrunk to four views' worth
        ((1000, 500), 729 + 40 * (81 + 1)),  # 3 x 2 tiles, 54 - 40 rows of padding cut off
    ],
)
def test_tokens_of_a_picture_of_llada_v(size: tuple[int, int], tokens: int) -> None:
    processor = random_processor(ADAPTERS.load("llada_v"), real_spec("llada_v"))
    ids = processor(images=[[picture(0, *size)]], text=["<image>"], return_tensors="pt")
    assert int((ids["input_ids"] == processor.image_token_id).sum()) == tokens


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_are_those_of_the_release(family: str, size: tuple[int, int]) -> None:
    """Resized by the same library as the release does, so to the level."""
    image = picture(7, *size)
    result = adapter_of(family).encode([chat("w", image)])
    wanted, _ = pixels(image, PLANES[family], SIDES[family])
    assert result["pixel_values"].shape[1:] == wanted.shape
    close(result["pixel_values"][0], torch.from_numpy(wanted), 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_of_several_pictures_is_padded_to_a_square(family: str) -> None:
    """With the mean of the normalisation, 127 of 255, as wide on both sides."""
    images, side = [picture(1, 60, 31), picture(2, 20, 45)], SIDES[family]
    result = adapter_of(family).encode([chat("w", *images)])
    for image, actual in zip(images, result["pixel_values"], strict=True):
        edge = max(image.size)
        square = Image.new("RGB", (edge, edge), (127, 127, 127))
        square.paste(image, ((edge - image.width) // 2, (edge - image.height) // 2))
        resized = square.resize((side, side), Image.Resampling.BICUBIC)
        wanted = (torch.from_numpy(np.asarray(resized).copy()).double() / 255 - 0.5) / 0.5
        close(actual[0], wanted.permute(2, 0, 1), 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_of_several_pictures_has_its_patches_or_a_packed_view(family: str) -> None:
    """729 of 27 x 27 patches in the releases' evaluations; in training pooled by LaViDa, and with a newline."""
    images, side = [picture(1, 60, 31), picture(2, 20, 45)], SIDES[family] // 7
    pooled = side if family == "llada_v" else -(-side // 2)
    for name, tokens, special in ((f"{family}_several", side**2, 0), (family, pooled**2, 1)):
        adapter = adapter_of(name)
        layout = adapter.layout(adapter.encode([chat("w", *images)]))
        assert (layout.counts, layout.special) == ((2 * tokens,), (2 * special,))
    section = compose_section("model", MODELS[family])
    spec = model_spec({**section, "weights": "random", "device": "cpu"})
    assert spec.processor == {"several_pictures": "evaluation"}
    wrong = replace(DENOISING[family].spec, processor={"several_pictures": "some"})
    with pytest.raises(UserError, match=r"model\.processor\.several_pictures='some'"):
        load_tiny(wrong, saved_release(family))


def test_small_picture_takes_the_first_plane_that_the_release_lists() -> None:
    image = adapter_of("lavida").encode([chat("w", picture(0, 30, 30))])
    assert image["pixel_values"].shape[1] == 3
    _, shape = pixels(picture(0, 30, 30), PLANES["lavida"], SIDES["lavida"])
    assert shape == (2, 1)


# ------------------------------------------------------------------ the release


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_release_lands_where_it_belongs(family: str) -> None:
    loaded, stored = adapter_of(family).model.state_dict(), tensors_of(family)
    assert len(loaded) == len(stored)
    for name, value in loaded.items():
        assert torch.equal(value, stored[released(name, family == "lavida")].double()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_the_real_architecture_are_all_mapped(family: str) -> None:
    """Every tensor of the real model, and the bytes that the index of its text stack states."""
    model = full_model(real_spec(family))
    names = model.state_dict()
    for name in names:
        result = released(name, family == "lavida")
        for pattern, new in LLADA_RENAMES.items():
            result = re.sub(pattern, new, result)
        assert result == name
    text = [*model.model.language_model.parameters(), *model.lm_head.parameters()]
    size, layers, tensors = STACKS[family]
    assert 2 * sum(item.numel() for item in text) == size
    assert len(model.model.vision_tower.encoder.layers) == 26
    assert len(names) == layers * tensors + 3 + 26 * 16 + 5 + 4 + 1


def spoilt(tmp_path: Path, family: str, tensors: dict[str, Tensor] | None, **config: Any) -> Path:
    """Copy a release with other tensors, or other words in its config.json."""
    folder = shutil.copytree(saved_release(family), tmp_path / family)
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def refusal(family: str, folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_tiny(DENOISING[family].spec, folder)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_release_with_other_tensors_is_refused_by_name(tmp_path: Path, family: str) -> None:
    stored = {name: value.contiguous() for name, value in tensors_of(family).items()}
    newline = stored.pop("model.image_newline")
    line = refusal(family, spoilt(tmp_path / "missing", family, stored))
    assert "1 missing keys" in line
    assert "image_newline" in line
    stored["model.image_newline"] = newline
    last = "model.vision_tower.vision_tower.vision_model.encoder.layers.2.layer_norm1.bias"
    line = refusal(family, spoilt(tmp_path / "more", family, {**stored, last: newline.clone()}))
    assert "1 unexpected keys" in line
    assert "encoder.layers.2.layer_norm1.bias" in line
    wide = {**stored, "model.mm_projector.2.bias": torch.zeros(33)}
    line = refusal(family, spoilt(tmp_path / "wide", family, wide))
    assert "1 mismatched keys" in line
    assert "linear_2.bias" in line


@pytest.mark.parametrize(
    ("family", "config", "words"),
    [
        ("lavida", {"n_heads": 2}, "model.facts.text.heads=4"),
        ("llada_v", {"num_attention_heads": 2}, "model.facts.text.heads=4"),
        ("lavida", {"mm_patch_merge_type": "flat"}, "mm_patch_merge_type='flat'"),
        ("lavida", {"alibi": True}, "alibi=True"),
        ("llada_v", {"mm_vision_select_layer": -1}, "mm_vision_select_layer=-1"),
        ("lavida_dream", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("lavida_dream", {"model_type": "llava_llada"}, "is of type 'llava_llada'"),
        ("llada_v", {"rope_scaling": {"type": "linear"}}, "rope_scaling="),
        ("llada_v", {"image_grid_pinpoints": "all of them"}, "image_grid_pinpoints='all of them'"),
        ("llada_v", {"model_type": "llava_llama"}, "is of type 'llava_llama'"),
    ],
)
def test_a_release_that_computes_otherwise_is_refused(
    tmp_path: Path, family: str, config: dict[str, Any], words: str
) -> None:
    assert words in refusal(family, spoilt(tmp_path, family, None, **config))


def test_what_config_json_states_goes_before_the_config_file(tmp_path: Path) -> None:
    config = {"rope_theta": 1e4, "rms_norm_eps": 1e-6, "image_grid_pinpoints": [[35, 70]]}
    adapter = load_tiny(DENOISING["lavida"].spec, spoilt(tmp_path, "lavida", None, **config))
    text = adapter.decoder.config
    assert (text.rope_parameters["rope_theta"], text.rms_norm_eps) == (1e4, 1e-6)
    assert adapter.model.config.image_grid_pinpoints == [[70, 35]]
    assert adapter.processor.image_processor.image_grid_pinpoints == [[70, 35]]


def test_planes_keep_the_order_of_the_release() -> None:
    ranged = planes("(1x1),...,(2x3)", 10)
    assert ranged == [[10, 10], [20, 10], [30, 10], [10, 20], [20, 20], [30, 20]]
    wanted = [[768, 384], [384, 768], [768, 768], [384, 1152], [1152, 384]]
    written = "[(384, 768), (768, 384), (768, 768), (1152, 384), (384, 1152)]"
    assert planes(written, 384) == wanted
    assert real_spec("lavida").architecture["model"]["image_grid_pinpoints"] == wanted


# ------------------------------------------------------------------ words


SYSTEM = (
    "<|startoftext|><|start_header_id|>system<|end_header_id|>\n\nYou are a helpful language and vision assistant. You "
    "are able to understand the visual content that the user provides, and assist the user with a variety of tasks "
    "using natural language.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
)
ANSWER = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"


@pytest.mark.parametrize(("family", "suffix"), [("lavida", ""), ("llada_v", " /no_think")])
def test_prompts_are_those_of_the_releases(family: str, suffix: str) -> None:
    adapter = adapter_of(family)
    assert adapter.render(chat("What?\n ", 0)) == f"{SYSTEM}<image>\nWhat?{suffix}{ANSWER}"
    assert adapter.render(chat("A\nB", 0, 1)) == f"{SYSTEM}<image> <image>\nA\nB{suffix}{ANSWER}"
    thinking = replace(DENOISING[family].spec, conversation="llada_think")
    adapter = load_tiny(thinking, saved_release(family))
    assert adapter.render(chat(" What?")) == f"{SYSTEM}What? /think{ANSWER}"


def test_dreams_tokenizer_keeps_the_line_break_behind_a_picture() -> None:
    """Its prompt does not begin with the begin token, so that the release drops nothing."""
    assert compare_tokens(adapter_of("lavida_dream"), chat("What?", 0)).difference is None


@pytest.mark.parametrize("family", ["llada_v", "lavida"])
def test_the_token_that_the_originals_drop_behind_a_picture_is_told(family: str) -> None:
    """The releases drop the first token of each piece after a picture, the line break; `flush` writes none."""
    result = compare_tokens(adapter_of(family), chat("What?", 0))
    assert result.difference is not None
    place = result.ours.index(SEEN) + 1
    assert result.words[result.ours[place]] == byte_tokenizer().tokenize("\n")[0]
    assert result.reference == (*result.ours[:place], *result.ours[place + 1 :])
    spec = DENOISING[family].spec
    flush = load_tiny(
        replace(spec, prompt=replace(spec.prompt, join="flush")), saved_release(family)
    )
    assert compare_tokens(flush, chat("What?", 0)).ours == result.reference


@pytest.mark.parametrize(
    ("family", "raw", "answer"),
    [
        ("lavida", "!! A cat.", "A cat."),
        ("llada_v", "A cat.", "A cat"),
        ("llada_v", "A...", "A.."),
        ("llada_v", "! 3.5", "! 3.5"),
    ],
)
def test_answers_are_cleaned_as_the_releases_do(family: str, raw: str, answer: str) -> None:
    adapter = adapter_of(family)
    ids = adapter.processor.tokenizer(f"{raw}<|eot_id|>", return_tensors="pt")["input_ids"]
    assert adapter.decode(ids) == [answer]


def test_dreams_prompt_is_chatml_with_lavidas_sentence() -> None:
    system = SYSTEM.split("\n\n")[1].split("<|eot_id|>")[0]
    expected = (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n<image>\nWhat?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert adapter_of("lavida_dream").render(chat("What?", 0)) == expected
    dream = real_spec("lavida_dream").facts.diffusion
    assert (dream.mask_id, dream.end_ids, dream.shifted) == (151666, (151643, 151645), True)


def test_masks_and_ends_of_the_real_models() -> None:
    lavida, llada_v = (real_spec(family).facts.diffusion for family in ("lavida", "llada_v"))
    assert lavida.mask_id == llada_v.mask_id == 126336
    assert (lavida.prefix_cache, llada_v.prefix_cache) == (True, False)
    assert (lavida.forbidden_ids, set(llada_v.forbidden_ids)) == (
        (),
        {126081, 126080, 126346, 126347},
    )


def test_placeholders_behind_the_embedding_are_refused() -> None:
    spec = DENOISING["lavida"].spec
    facts = replace(spec.facts, vocabulary=260)
    with pytest.raises(UserError, match=r"264 tokens with <image> and <video>, the embedding 260"):
        load_tiny(replace(spec, facts=facts), saved_release("lavida"))


def test_a_denoising_model_is_an_adapter_like_any(tmp_path: Path) -> None:
    """With random weights, as from a release: the same parts under the same facts."""
    spec = replace(DENOISING["lavida"].spec, weights="random", dtype="float32")
    adapter: Adapter = build_adapter(ADAPTERS.load("lavida"), spec)
    assert adapter.decoder.config.is_causal is False
    assert adapter.image_tokens() is None
    counts = adapter.layout(adapter.encode(DENOISING["lavida"].chats)).counts
    assert (
        counts
        == adapter_of("lavida")
        .layout(adapter_of("lavida").encode(DENOISING["lavida"].chats))
        .counts
    )
