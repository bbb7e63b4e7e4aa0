"""DeepSeek-OCR: views and their positions, token counts of all modes, pixels, prompt, tensor names of the release."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import ImageOps
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, NoRepeatNGramLogitsProcessor

from espalier.harness.errors import UserError
from espalier.harness.models import build_adapter as base
from espalier.harness.models.architectures.deepseek_ocr import (
    OcrImageProcessor,
    as_transformers,
    as_vllm,
)
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.models.families import ADAPTERS
from espalier.methods.base import Need, Site
from tests.families.deepseek import FAMILIES, GUNDAM, PLAIN, small
from tests.families.deepseek2 import FAMILIES as DEEPSEEK2
from tests.family_runs import calls_of, numbered_units, shown
from tests.tiny import chat, full_model, load_tiny, model_of, picture, save_tiny

NAMES = list(FAMILIES)
MODES = ("tiny", "small", "base", "large", "gundam")


def mode(name):
    """The model's part of a run, from its config file."""
    return model_of(f"model=deepseek_ocr_{name}")


def real_geometry(name, **changes):
    """Patches, windows, views and crops of a config file on a tiny model."""
    tiny = small(16)
    architecture = {**tiny.architecture, "stem": {**tiny.architecture["stem"], "window_size": 14}}
    processor = {**mode(name).processor, **changes}
    return load_adapter(replace(tiny, processor=processor, architecture=architecture))


# ---------------------------------------------------------------------- which unit is which token


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", [*NAMES, *DEEPSEEK2])
def test_every_unit_lands_on_the_placeholder_that_the_layout_says(name):
    """The projector's outputs are replaced by their number, counted over its calls; the model packs them."""
    family = {**FAMILIES, **DEEPSEEK2}[name]
    adapter = load_adapter(family.spec)
    with torch.no_grad():
        if name in FAMILIES:
            adapter.model.model.image_newline.fill_(-1.0)
        adapter.model.model.view_separator.fill_(-2.0)
    inputs = adapter.encode(family.chats)
    layout = adapter.layout(inputs)
    total, entered = numbered_units(adapter, inputs)
    holders = inputs["input_ids"] == adapter.model.config.image_token_id
    numbers, separators = [], 0
    for row, count in enumerate(layout.counts):
        visual = layout.visual[row, :count]
        units = entered[row, visual, 0]
        assert torch.equal(units.long(), layout.source[row, :count, 0])
        numbers += units.tolist()
        others_row = holders[row].clone()
        others_row[visual] = False
        special = entered[row, others_row, 0]
        assert ((special == -1) | (special == -2)).all()  # no cell among what is never pruned
        assert layout.special[row] == len(special)
        separators += int((special == -2).sum())
    assert sorted(numbers) == list(range(total))
    assert separators == len(inputs["pixel_values"])


def test_crops_are_one_plane_before_the_whole_image():
    """A picture of two crops: 2 x 4 cells of view 1, tiles 1 and 2, then 3 x 3 of view 0."""
    adapter = load_adapter(GUNDAM)
    layout = adapter.layout(adapter.encode([chat("w1", picture(0, 64, 36))]))
    crops = [(0, 1, row, column) for row in range(2) for column in range(4)]
    global_view = [(0, 0, row, column) for row in range(3) for column in range(3)]
    assert [tuple(place) for place in layout.grid[0].tolist()] == crops + global_view
    assert layout.tile[0].tolist() == [1, 1, 2, 2] * 2 + [0] * 9
    assert layout.source[0, :, 0].tolist() == [9, 10, 13, 14, 11, 12, 15, 16, *range(9)]
    assert layout.special == (2 + 3 + 1,)
    work = layout.work[0]
    assert (work.units, work.tokens, work.pairs) == (17, 10 + 2 * 5, 100 + 2 * 25)
    assert (work.stem_tokens, work.stem_pairs) == (144 + 2 * 64, 144**2 + 2 * 64**2)
    assert (
        work.stem_window_pairs == 16 * 81 + 2 * 9 * 81
    )  # windows of 3 x 3: 4 x 4, and 3 x 3 a crop


# ---------------------------------------------------------------------- token counts


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "size", "cells", "positions"),
    [
        ("tiny", (900, 700), 64, 73),
        ("small", (900, 700), 100, 111),
        ("base", (900, 700), 256, 273),
        ("large", (900, 700), 400, 421),
        ("gundam", (640, 400), 256, 273),
        ("gundam", (1300, 1290), 656, 693),
        ("gundam", (1200, 800), 856, 893),
        ("gundam", (800, 1200), 856, 903),
        ("gundam", (700, 100), 956, 256 + 700 + 16 + 1 + 10),
    ],
)
def test_counts_and_positions_of_every_mode(name, size, cells, positions):
    adapter = real_geometry(name)
    layout = adapter.layout(adapter.encode([chat("Free OCR.", picture(0, *size))]))
    assert layout.counts == (cells,)
    assert layout.counts[0] + layout.special[0] == positions
    assert layout.text[0] == layout.special[0] + 1 + len("\nFree OCR.")  # and begin-of-sequence


def test_nine_crops_where_the_config_allows_them():
    adapter = real_geometry("gundam", max_patches=9)
    layout = adapter.layout(adapter.encode([chat("w1", picture(0, 1920, 1920))]))
    assert layout.counts == (256 + 900,)
    # The larger of two grids of one shape is for images that fill half of it.
    layout = adapter.layout(adapter.encode([chat("w1", picture(0, 700, 700))]))
    assert layout.counts == (256 + 400,)


def test_the_model_takes_the_counts_of_real_geometry():
    """The forward compares placeholders with features; windows of 14 are padded as counted."""
    adapter = real_geometry("tiny")
    inputs = adapter.encode([chat("w1", picture(0, 500, 400)), chat("w2 w3", picture(1, 30, 40))])
    with calls_of(adapter.tower.sam_encoder.layers[0].attn) as calls, torch.inference_mode():
        assert adapter.model(**inputs).logits.isfinite().all()
    work = adapter.layout(inputs).work
    assert [call.kwargs["hidden_states"].shape[:3] for call in calls] == [(2 * 9, 14, 14)]
    assert [w.stem_window_pairs for w in work] == [9 * 196**2] * 2
    assert [w.stem_tokens for w in work] == [1024] * 2


# ---------------------------------------------------------------------- pixels


def pixels(view):
    """(3, H, W) normalised pixels, as the release computes them."""
    values = torch.from_numpy(np.array(view)).permute(2, 0, 1).float() / 255
    return (values - 0.5) / 0.5


def processed(name, still):
    out = OcrImageProcessor(**mode(name).processor)([still], return_tensors="pt")
    return out["pixel_values"][0], out.get("pixel_values_local"), out["patches_grid"][0]


@pytest.mark.parametrize(("name", "side"), [("tiny", 512), ("small", 640)])
def test_small_views_are_stretched(name, side):
    still = picture(0, 701, 333)
    global_view, crops, _ = processed(name, still)
    assert crops is None
    assert (global_view - pixels(still.resize((side, side)))).abs().max() < 1e-6


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("name", "side"), [("base", 1024), ("large", 1280), ("gundam", 1024)])
@pytest.mark.parametrize("size", [(701, 333), (333, 900), (200, 100), (640, 640)])
def test_large_views_are_padded_with_grey(name, side, size):
    still = picture(0, *size)
    global_view, _, _ = processed(name, still)
    assert (
        global_view - pixels(ImageOps.pad(still, (side, side), color=(127,) * 3))
    ).abs().max() < 1e-6
    if size[0] != size[1]:
        assert (global_view[:, 0, 0] - (127 / 255 - 0.5) / 0.5).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("size", "grid"), [((1200, 800), [3, 2]), ((641, 100), [6, 1]), ((700, 1500), [1, 2])]
)
def test_crops_are_cut_from_the_stretched_image_in_raster_order(size, grid):
    still = picture(0, *size)
    _, crops, result = processed("gundam", still)
    assert result == grid
    canvas = pixels(still.resize((640 * grid[0], 640 * grid[1])))
    for number, crop in enumerate(crops):
        y, x = (640 * n for n in divmod(number, grid[0]))
        assert (crop - canvas[:, y : y + 640, x : x + 640]).abs().max() < 1e-6


# ---------------------------------------------------------------------- prompt


def test_the_prompt_is_plain():
    adapter = load_adapter(PLAIN)
    tokenizer = adapter.processor.tokenizer
    inputs = adapter.encode([chat("Free OCR. ", 0), chat("w1 w2 w3 w4", 1, 2)])
    image = adapter.model.config.image_token_id
    pieces = [tokenizer.encode(text, add_special_tokens=False) for text in ("\nFree OCR.", "\n")]
    first = [tokenizer.bos_token_id, *[image] * 13, *pieces[0]]
    padding = inputs["input_ids"].shape[1] - len(first)
    assert inputs["input_ids"][0].tolist() == [tokenizer.pad_token_id] * padding + first
    second = [tokenizer.bos_token_id, *[image] * 13, *pieces[1], *[image] * 13, *pieces[1]]
    assert inputs["input_ids"][1].tolist()[: len(second)] == second
    assert adapter.layout(inputs).special == (4, 8)


@pytest.mark.slow
def test_the_repeat_guard_counts_the_whole_sequence():
    """The class has a guard of its own within a window; the config file leaves it off."""
    spec = mode("gundam")
    result = load_adapter(GUNDAM).model._get_logits_processor(
        GenerationConfig(**spec.generation), input_ids_seq_length=1, device="cpu"
    )
    guards = [item for item in result if isinstance(item, NoRepeatNGramLogitsProcessor)]
    assert [(type(item), item.ngram_size) for item in guards] == [
        (NoRepeatNGramLogitsProcessor, 35)
    ]


# ---------------------------------------------------------------------- signals


@pytest.mark.parametrize("name", NAMES)
def test_tower_signals_equal_those_computed_from_captured_states(name, tmp_path):
    family = FAMILIES[name]
    needs = tuple(
        Need(signal, layer) for signal in ("cls_attention", "tower_keys") for layer in (None, 0)
    )
    adapter = load_tiny(family.spec, save_tiny(family.spec, tmp_path), "float32")
    states = {}

    def keep(name):
        return lambda module, args, output: states.setdefault(name, []).append(output)

    for index, layer in enumerate(adapter.tower.vision_encoder.encoder.layers):
        layer.self_attn.q_proj.register_forward_hook(keep((index, "query")))
        layer.self_attn.k_proj.register_forward_hook(keep((index, "key")))
    inputs = adapter.encode([family.chats[1]])
    signals = shown(adapter, [Site("vision")], needs, [family.chats[1]])[0].signals
    source = adapter.layout(inputs).source[0, :, 0]
    for layer, suffix in ((adapter.facts.tower.layers - 1, ""), (0, "@0")):
        attended, keys = [], []
        for query, key in zip(states[layer, "query"], states[layer, "key"], strict=True):
            q, k = (value.unflatten(-1, (4, 8)).transpose(1, 2).double() for value in (query, key))
            weights = (q[:, :, :1] @ k.transpose(2, 3) / 8**0.5).softmax(-1)
            attended.append(weights.mean(1)[:, 0, 1:].flatten())
            keys.append(k.mean(1)[:, 1:].flatten(0, 1))
        expected = torch.cat(attended)[source]
        assert (signals[f"cls_attention{suffix}"][0] - expected).abs().max() <= 5e-6
        assert (expected - expected.mean()).abs().max() > 1e-4
        expected = torch.cat(keys)[source]
        scale = expected.abs().max()
        assert (signals[f"tower_keys{suffix}"][0] - expected).abs().max() <= 5e-6 * scale


# ---------------------------------------------------------------------- the release's format


def released(state):
    """The tensors of a model under the names and in the packing of the release."""
    plain = {
        "model.multi_modal_projector.": "model.projector.layers.",
        "model.view_separator": "model.view_seperator",
        "model.language_model.": "model.",
        "model.vision_tower.sam_encoder.": "model.sam_model.",
        "model.vision_tower.vision_encoder.encoder.": "model.vision_model.transformer.",
        "model.vision_tower.vision_encoder.": "model.vision_model.",
    }
    stem = {
        "layers.": "blocks.",
        "neck.conv1": "neck.0",
        "neck.layer_norm1": "neck.1",
        "neck.conv2": "neck.2",
        "neck.layer_norm2": "neck.3",
        ".layer_norm": ".norm",
        "patch_embed.projection": "patch_embed.proj",
        "sam_model.proj.conv1": "sam_model.net_2",
        "sam_model.proj.conv2": "sam_model.net_3",
    }
    result = {}
    for name, value in state.items():
        for ours, theirs in plain.items():
            if name.startswith(ours):
                name = theirs + name.removeprefix(ours)
                break
        if ".sam_model." in name:
            for ours, theirs in stem.items():
                name = name.replace(ours, theirs)
        if name.endswith("experts.gate_up_proj"):
            for number, expert in enumerate(value):
                stub = name.replace("gate_up_proj", f"{number}.")
                result[f"{stub}gate_proj.weight"], result[f"{stub}up_proj.weight"] = expert.chunk(2)
        elif name.endswith("experts.down_proj"):
            for number, expert in enumerate(value):
                result[name.replace("down_proj", f"{number}.down_proj.weight")] = expert
        elif ".vision_model." in name and ".self_attn.q_proj." in name:
            parts = [state[_ours(name).replace("q_proj", f"{item}_proj")] for item in "qkv"]
            result[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif not (".vision_model." in name and (".k_proj." in name or ".v_proj." in name)):
            result[name] = value
    result["model.vision_model.embeddings.patch_embedding.weight"] = torch.zeros(32, 3, 2, 2)
    return {name: value.clone().contiguous() for name, value in result.items()}


def _ours(name):
    return name.replace(
        "model.vision_model.transformer.", "model.vision_tower.vision_encoder.encoder."
    )


@pytest.fixture(scope="module")
def original():
    """A model with random values in every parameter."""
    adapter = load_adapter(GUNDAM)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapter.model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return adapter


@pytest.fixture
def release(original, tmp_path):
    """A folder as the release has it: its tensor names, a config.json of remote code, a tokenizer."""
    save_file(released(original.model.state_dict()), tmp_path / "model.safetensors")
    foreign = {
        "model_type": "deepseek_vl_v2",
        "architectures": ["DeepseekOCRForCausalLM"],
        "auto_map": {"AutoModel": "modeling_deepseekocr.DeepseekOCRForCausalLM"},
        "vocab_size": 99,
    }
    (tmp_path / "config.json").write_text(json.dumps(foreign))
    original.processor.tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = (
        "LlamaTokenizerFast"  # it would put another pre-tokenizer in place
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


#: What the release's config.json says of sizes, for the tiny instance.
STATED = {
    "language_config": {
        **{"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "vocab_size": 288},
        **{"num_key_value_heads": 4, "intermediate_size": 48, "moe_intermediate_size": 12},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
        "first_k_dense_replace": 1,
    },
    "vision_config": {
        "width": {
            "clip-l-14-224": {"width": 32, "layers": 2, "heads": 4},
            "sam_vit_b": {"width": 24, "layers": 2, "heads": 4, "global_attn_indexes": [1]},
        }
    },
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("language_config", "num_attention_heads"), 2, "text.heads=4, the loaded model has 2"),
        (("language_config", "first_k_dense_replace"), 0, "text.first_intermediate=48"),
        (("language_config", "num_experts_per_tok"), 3, "text.intermediate=36"),
        (("vision_config", "width", "clip-l-14-224", "heads"), 8, "tower.heads=4"),
        (("vision_config", "width", "sam_vit_b", "heads"), 2, "stem.heads=4"),
        (
            ("vision_config", "width", "sam_vit_b", "global_attn_indexes"),
            [],
            "stem.window_layers=1",
        ),
    ],
)
def test_sizes_that_the_release_states_are_compared_with_the_facts(release, place, value, words):
    """Heads are in no tensor's shape; the release's own config.json is the only witness."""
    file = release / "config.json"
    config = {**json.loads(file.read_text()), **json.loads(json.dumps(STATED))}
    file.write_text(json.dumps(config))
    load_adapter(replace(GUNDAM, path=release, weights="trained"))
    table = config
    for name in place[:-1]:
        table = table[name]
    table[place[-1]] = value
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"model.facts.{words}"):
        load_adapter(replace(GUNDAM, path=release, weights="trained"))


def test_another_model_is_refused_by_its_type_before_anything_is_built(release, monkeypatch):
    (release / "config.json").write_text(json.dumps({"model_type": "llava"}))
    monkeypatch.setattr(base, "build_skeleton", lambda *_: pytest.fail("it was built"))
    with pytest.raises(UserError, match=r"is of type 'llava', valid: 'deepseek_vl_v2' or 'unl"):
        load_adapter(replace(GUNDAM, path=release, weights="trained"))


def test_the_released_names_load_with_equal_logits(original, release):
    loaded = load_adapter(replace(GUNDAM, weights="trained", path=release))
    chats = FAMILIES["deepseek_ocr_gundam"].chats
    with torch.inference_mode():
        expected = original.model(**original.encode(chats)).logits
        logits = loaded.model(**loaded.encode(chats)).logits
    assert torch.equal(logits, expected)
    assert loaded.processor.tokenizer.encode("w 1") == original.processor.tokenizer.encode("w 1")
    assert loaded.pad_id == original.pad_id
    names = {name for name in load_file(release / "model.safetensors") if "experts." in name}
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in names


LIBRARY = "model.language_model.layers"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("lm_head.weight", "has no lm_head.weight, and tie_word_embeddings is false"),
        (
            "model.layers.1.mlp.experts.2.down_proj.weight",
            "1 mismatched keys, the first is model.language_model.layers.1.mlp.experts.down_proj",
        ),
        ("model.layers.0.self_attn.q_proj.weight", f"{LIBRARY}.0.self_attn.q_proj.weight"),
        ("model.layers.2.mlp.gate.weight", f"{LIBRARY}.2.mlp.gate.weight"),
        ("model.sam_model.net_3.weight", "model.vision_tower.sam_encoder.proj.conv2.weight"),
        (
            "model.vision_model.transformer.layers.1.self_attn.qkv_proj.weight",
            "3 missing keys, the first is model.vision_tower.vision_encoder.encoder.layers.1.self_attn.k_proj",
        ),
        ("model.projector.layers.bias", "model.multi_modal_projector.bias"),
        ("model.view_seperator", "model.view_separator"),
        # Experts are stacked while they are read: the library's report names the tensor, its error does not.
        ("model.layers.1.mlp.experts.2.up_proj.weight", "conversion of the weights"),
        # Further ones.
        ("model.layers.7.input_layernorm.weight", f"{LIBRARY}.7.input_layernorm.weight"),
        ("model.sam_model.blocks.9.norm1.bias", "sam_encoder.layers.9.layer_norm1.bias"),
        ("more", "1 unexpected keys, the first is more"),
    ],
)
def test_a_missing_or_further_tensor_is_refused_by_its_name_in_the_library(release, name, line):
    tensors = load_file(release / "model.safetensors")
    if tensors.pop(name, None) is None:
        tensors[name] = torch.zeros(3)
    save_file(tensors, release / "model.safetensors")
    with pytest.raises(UserError, match=re.escape(line)):
        load_adapter(replace(GUNDAM, weights="trained", path=release))


# ---------------------------------------------------------------------- real sizes


def test_the_config_file_builds_the_released_architecture():
    spec = mode("base")
    model = full_model(spec)
    config = model.config
    # The release's file holds 6672212480 bytes, with CLIP's own patch embedding, which is not used.
    unused = 1024 * 3 * 14 * 14
    assert 2 * (sum(p.numel() for p in model.parameters()) + unused) == 6_672_212_480
    projector = model.model.multi_modal_projector
    assert (projector.in_features, projector.out_features) == spec.facts.projector
    text, facts = config.text_config, spec.facts.text
    routed = text.num_experts_per_tok * text.moe_intermediate_size
    assert facts.intermediate == routed + text.n_shared_experts * text.moe_intermediate_size
    assert set(text.layer_types) == {"full_attention"}
    windowed = set(range(12)) - set(config.vision_config.sam_config.global_attn_indexes)
    assert spec.facts.stem.window_layers == len(windowed)


def test_the_grouped_kernel_of_real_runs_equals_a_loop_over_experts(original):
    """The config files ask for it; the tiny models loop, since it has no double precision."""
    assert mode("base").architecture["model"] == {"experts_implementation": "grouped_mm"}
    inputs = original.encode(FAMILIES["deepseek_ocr_gundam"].chats)
    logits = []
    for kernel in ("eager", "grouped_mm"):
        original.model.set_experts_implementation(kernel)
        with torch.inference_mode():
            logits.append(original.model(**inputs).logits)
    original.model.set_experts_implementation("eager")
    assert (logits[0] - logits[1]).abs().max() <= 5e-6 * logits[0].abs().max()


def test_modes_differ_in_their_views_only():
    base = mode("base")
    nominal = {}
    for name in MODES:
        spec = mode(name)
        nominal[name] = spec.facts.visual_tokens
        assert replace(spec, name=base.name, processor=base.processor, facts=base.facts) == base
        work = base.facts.nominal_work
        assert replace(spec.facts, visual_tokens=256, nominal_work=work) == base.facts
    assert nominal == {"tiny": 64, "small": 100, "base": 256, "large": 400, "gundam": 856}


# ---------------------------------------------------------------------- answers

PAGE = (
    "<|ref|>title<|/ref|><|det|>[[1, 2, 3, 4]]<|/det|>\n# A page\n\n"
    "<|ref|>image<|/ref|><|det|>[[5, 6, 7, 8]]<|/det|>\n"
    "<|ref|>image<|/ref|><|det|>[[5, 6, 7, 9]]<|/det|>"
    "a \\coloneqq b \\eqqcolon c\n\n\n<center>\\[x \\quad (3)\\]</center> y \\quad (4)"
)


def test_the_clean_up_of_the_transformers_code_links_pictures_and_drops_other_boxes():
    assert as_transformers(PAGE) == (
        "\n# A page\n\n![](images/0.jpg)\n\n![](images/1.jpg)\n"
        "a := b =: c\n\n\n<center>\\[x \\quad (3)\\]</center> y \\quad (4)"
    )


def test_the_clean_up_of_the_vllm_code_drops_all_boxes_and_numbers_of_formulas():
    assert as_vllm(PAGE) == ("\n# A page\n\na \\coloneqq b \\eqqcolon c\n\n\\[x \\] y \\quad (4)")


@pytest.mark.parametrize("clean_up", [None, "transformers"])
def test_answers_keep_special_tokens_up_to_their_end(clean_up):
    spec = (
        GUNDAM
        if clean_up is None
        else replace(GUNDAM, processor={**GUNDAM.processor, "clean_up": clean_up})
    )
    adapter = load_adapter(spec)
    tokenizer = adapter.processor.tokenizer
    marked = tokenizer.encode(" a<image>b \\coloneqq", add_special_tokens=False)
    end, pad = tokenizer.eos_token_id, adapter.pad_id
    rows = [[*marked, end, pad, pad], [*marked[:2], end, *[pad] * (len(marked))]]
    answers = adapter.decode(torch.tensor(rows))
    # `<image>` is special, and stays, as `<|ref|>` does in the release's tokenizer.
    assert answers[0] == ("a<image>b \\coloneqq" if clean_up is None else "a<image>b :=")
    assert answers[1] == "a"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"clean_up": "all"}, ".clean_up='all' is unknown; valid: null, transformers, vllm"),
        ({"size": 768}, ".size=768 must be a table"),
        ({"size": {"height": 768}}, ".size.width is missing"),
        ({"size": {"height": 768, "width": 768, "depth": 3}}, ".size.depth is not a config key"),
        ({"size": {"height": 768, "width": 1024}}, "views are square; valid: 768"),
        ({"tile_size": None}, ".tile_size=None must be an integer of at least 1"),
        ({"tile_size": "640"}, ".tile_size='640' must be an integer of at least 1"),
        ({"min_patches": 0}, ".min_patches=0 must be an integer of at least 1"),
        ({"min_patches": 7, "max_patches": 6}, ".min_patches=7 is above max_patches=6"),
        ({"crop_to_patches": 1}, ".crop_to_patches=1 must be true or false"),
        ({"image_mean": "x"}, ".image_mean='x' must be a list"),
        ({"image_std": [0.5]}, ".image_std=[0.5] must be three numbers"),
    ],
)
@pytest.mark.parametrize("name", ["deepseek_ocr_gundam", "deepseek_ocr2"])
def test_settings_that_make_no_views_are_refused(name, settings, line):
    spec = model_of(f"model={name}")
    spec = replace(spec, processor={**spec.processor, **settings})
    with pytest.raises(UserError, match=re.escape(line)):
        ADAPTERS.load(spec.adapter).check_settings(spec)
