"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: order of projector units, towers with windows, times of videos."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import AutoProcessor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.vision_utils import get_vision_window_index

from espalier.harness.config.build_spec import build_spec
from espalier.harness.cost.budget import Budget
from espalier.harness.engine.attention_probe import AttentionTap
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.harness.media.frames import Clip
from espalier.harness.models.build_adapter import load_adapter
from espalier.harness.models.families import ADAPTERS
from espalier.harness.models.random_weights import byte_tokenizer
from espalier.harness.specs.run_spec import VideoSpec
from espalier.methods.base import Need, Site
from tests import commands
from tests.families.qwen import (
    BOUNDS,
    IMAGES,
    MIXED,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    QWEN25,
    VIDEOS,
    clip,
    video_chat,
)
from tests.family_runs import ONE_TOKEN, calls_of, placed_units, shown
from tests.tiny import Recorder, chat, full_model, load_tiny, model_of, picture, save_tiny

SPECS = {"qwen2_vl": QWEN2, "qwen2_5_vl": QWEN25, "qwen3_vl": QWEN3}
CHATS = {"images": IMAGES, "videos": VIDEOS, "mixed": MIXED}
VISION = (Site("vision"),)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: save_tiny(spec, tmp_path_factory.mktemp(name)) for name, spec in SPECS.items()}


@pytest.fixture(params=list(SPECS))
def name(request):
    return request.param


def fresh(name, **changes):
    """A model with random weights that a test may take apart."""
    return load_adapter(replace(SPECS[name], **changes))


def frames_of(adapter, inputs, kind):
    """The (1, rows, columns) patch grids of all images, or of all frames of all videos."""
    grids = inputs.get(f"{kind}_grid_thw", torch.zeros(0, 3, dtype=torch.long))
    return [(1, rows, columns) for frames, rows, columns in grids.tolist() for _ in range(frames)]


# ---------------------------------------------------------------------- which unit is which token


@pytest.fixture
def adapter(name):
    return fresh(name)


@pytest.mark.parametrize("kind", CHATS)
def test_every_unit_lands_on_the_placeholder_that_the_layout_says(adapter, kind):
    """The projector's outputs are replaced by their number, counted over its calls; the model scatters them."""
    inputs = adapter.encode(CHATS[kind])
    layout = adapter.layout(inputs)
    assert sum(work.units for work in layout.work) == placed_units(adapter, inputs)
    assert (layout.share, layout.special) == (None, (0,) * len(layout.counts))


def painted(frames, rows, columns, start):
    """(frames, 14 rows, 14 columns, 3) pixels: every square of each frame has a shade of its own."""
    shade = start + 2 * np.arange(frames * rows * columns).reshape(frames, rows, 1, columns, 1, 1)
    return np.broadcast_to(shade, (frames, rows, 14, columns, 14, 3)).reshape(
        frames, rows * 14, columns * 14, 3
    )


def test_every_unit_holds_the_pixels_of_its_grid_place(adapter, name):
    """The tower is reduced to its patch embedding, which is set to the patch's brightness."""
    adapter.tower.blocks = nn.ModuleList()
    embed = adapter.tower.patch_embed.proj
    with torch.no_grad():
        embed.weight.zero_()
        embed.weight[0] = 1 / embed.weight[0].numel()
        if name == "qwen3_vl":  # whose patches also have a bias and learned places
            embed.bias.zero_()
            adapter.tower.pos_embed.weight.zero_()
    still = [painted(1, 3, 4, 10)[0].astype(np.uint8), painted(1, 5, 2, 100)[0].astype(np.uint8)]
    film = np.repeat(painted(2, 3, 3, 150), 2, axis=0).astype(np.uint8)
    film = Clip(film, (0, 1, 2, 3), (0.0, 1.0, 2.0, 3.0), 1.0, 4, 4.0)
    parts = [{"type": kind} for kind in ("video", "image", "image")]
    text = adapter.render(video_chat("w1", *parts))
    inputs = adapter.process([text], [[Image.fromarray(pixels) for pixels in still]], [[film]])
    layout = adapter.layout(inputs)
    with calls_of(adapter.projector) as calls, torch.inference_mode():
        adapter.model(**inputs)
    units = torch.cat([adapter.features(call.args[0]) for call in calls])[:, 0]
    # The video stands first: its frames are images 0 and 1, the pictures 2 and 3.
    expected = torch.cat(
        [
            torch.from_numpy(pixels[:, ::14, ::14, 0].astype(np.float32)).flatten()
            for pixels in (film.frames[::2], still[0][None], still[1][None])
        ]
    )
    means = torch.tensor(adapter.processor.image_processor.image_mean)
    deviations = torch.tensor(adapter.processor.image_processor.image_std)
    brightness = ((expected.unsqueeze(1) / 255 - means) / deviations).mean(1)
    assert (units[layout.source[0, :, 0]] - brightness).abs().max() < 1e-5
    sizes = [(0, 3, 3), (1, 3, 3), (2, 3, 4), (3, 5, 2)]
    places = [
        (image, 0, r, c)
        for image, rows, columns in sizes
        for r in range(rows)
        for c in range(columns)
    ]
    assert layout.grid[0].tolist() == [list(place) for place in places]


def test_windows_are_those_of_the_tower():
    adapter = fresh("qwen2_5_vl")
    for shape in [(1, 2, 2), (1, 4, 4), (1, 6, 10), (3, 10, 6), (2, 14, 2), (1, 8, 12)]:
        order, pairs = adapter.order(shape)
        expected, bounds = get_vision_window_index(
            torch.tensor([shape]), spatial_merge_size=2, window_size=28, patch_size=7
        )
        assert torch.equal(order, expected)
        assert pairs == sum(n * n for n in bounds.diff().tolist())


@pytest.mark.parametrize("kind", CHATS)
def test_work_is_what_the_tower_attends_to(adapter, name, kind):
    """Counted at the attention function, in a layer that spans images and in one that does not."""
    blocks, counted = adapter.tower.blocks, {}

    def watch(layer):
        def watcher(query, key, scaling):
            tokens, pairs = counted.get(layer, (0, 0))
            counted[layer] = tokens + query.shape[2], pairs + query.shape[2] * key.shape[2]

        return blocks[layer].attn, watcher

    inputs = adapter.encode(CHATS[kind])
    with AttentionTap([watch(0), watch(len(blocks) - 1)]), torch.inference_mode():
        adapter.model(**inputs)
    work = adapter.layout(inputs).work
    totals = [
        sum(getattr(row, entry) for row in work) for entry in ("tokens", "pairs", "window_pairs")
    ]
    assert counted[len(blocks) - 1] == (totals[0], totals[1])
    assert totals[2] == (counted[0][1] if name == "qwen2_5_vl" else 0)
    assert totals[2] < totals[1]


# ---------------------------------------------------------------------- signals


def eager_tower(adapter, inputs, layer, monkeypatch):
    """The layer's own maps and keys, one of each call, as eager attention returns them."""
    family = importlib.import_module(type(adapter.model).__module__)
    original, maps = family.eager_attention_forward, []
    module = adapter.tower.blocks[layer].attn

    def remember(caller, query, key, *args, **kwargs):
        out, weights = original(caller, query, key, *args, **kwargs)
        if caller is module:
            maps.append((weights[0].mean((0, 1)), key[0].mean(0)))
        return out, weights

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(family, "eager_attention_forward", remember)
        adapter.model(**inputs)
    return maps


def in_raster_order(name, shape, values):
    """Mean over squares of patches, then windows undone as the tower undoes them after its projector."""
    units = values.unflatten(0, (-1, 4)).mean(1)
    if name != "qwen2_5_vl":
        return units
    order, _ = get_vision_window_index(
        torch.tensor([shape]), spatial_merge_size=2, window_size=28, patch_size=7
    )
    return units[torch.argsort(order)]


@pytest.mark.sampled(18)
@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("kind", CHATS)
def test_tower_signals_equal_eager_attention_in_raster_order(
    name, kind, layer, folders, monkeypatch
):
    sdpa = load_tiny(SPECS[name], folders[name], "float32")
    eager = load_tiny(SPECS[name], folders[name], "float32", "eager")
    needs = (Need("cls_attention", layer), Need("tower_keys", layer))
    for item in CHATS[kind]:
        inputs = eager.encode([item])
        maps = eager_tower(eager, inputs, -1 if layer is None else layer, monkeypatch)
        shapes = [*frames_of(eager, inputs, "image"), *frames_of(eager, inputs, "video")]
        assert len(maps) == len(shapes)
        ordered = [
            tuple(in_raster_order(name, shape, value) for value in pair)
            for shape, pair in zip(shapes, maps, strict=True)
        ]
        stills = len(frames_of(eager, inputs, "image"))
        if (
            kind == "mixed" and item is MIXED[0]
        ):  # the video comes first in the prompt, last in the tower
            ordered = ordered[stills:] + ordered[:stills]
        received, keys = (torch.cat(parts) for parts in zip(*ordered, strict=True))
        signals = shown(sdpa, VISION, needs, [item])[0].signals
        assert (signals[needs[0].key][0] - received).abs().max() <= 5e-6
        assert (signals[needs[1].key][0] - keys).abs().max() <= 5e-6 * keys.abs().max()
        assert received.std() > 1e-4  # not a constant


@pytest.mark.parametrize("kind", CHATS)
def test_a_packed_tower_gives_the_same_signals(name, kind, folders, monkeypatch):
    """Flash attention takes all images and frames in one call; a stand-in cuts it up again."""
    adapter = load_tiny(SPECS[name], folders[name], "float32")
    needs = (Need("cls_attention"), Need("tower_keys"))
    single_views = shown(adapter, VISION, needs, CHATS[kind])
    family = importlib.import_module(type(adapter.model).__module__)
    plain, calls = ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def packed(module, query, key, value, attention_mask, cu_seq_lens_q=None, **kwargs):
        if cu_seq_lens_q is None:
            return plain(module, query, key, value, attention_mask, **kwargs)
        lengths = cu_seq_lens_q.diff().tolist()
        calls.append(len(lengths))
        parts = zip(*(tensor.split(lengths, 2) for tensor in (query, key, value)), strict=True)
        scaling = kwargs["scaling"]
        out = [plain(module, *part, None, scaling=scaling, is_causal=False)[0] for part in parts]
        return torch.cat(out, 1), None

    AttentionInterface.register("sdpa", packed)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(family, "is_flash_attention_requested", lambda config: True)
            together = shown(adapter, VISION, needs, CHATS[kind])
    finally:
        AttentionInterface.register("sdpa", plain)
    assert max(calls) > 1
    for item, other in zip(single_views, together, strict=True):
        for need in needs:
            assert torch.equal(item.signals[need.key], other.signals[need.key])


def test_a_tap_cuts_packed_calls_at_their_bounds(name):
    module = fresh(name).tower_attention(None)
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 24, 8, generator=generator).unbind(0)
    calls, ran = [], []
    tap = AttentionTap([(module, lambda *call: calls.append(call))])
    attention = tap._wrap(lambda module, query, *rest, **kwargs: ran.append((query, kwargs)))
    bounds = torch.tensor([0, 8, 12, 24], dtype=torch.int32)
    attention(module, query, key, value, None, scaling=0.3, cu_seq_lens_q=bounds)
    for (item, packed, scaling), (start, end) in zip(
        calls, [(0, 8), (8, 12), (12, 24)], strict=True
    ):
        assert torch.equal(item, query[:, :, start:end])
        assert torch.equal(packed, key[:, :, start:end])
        assert scaling == 0.3
    assert len(ran) == 1
    assert ran[0][0] is query
    assert ran[0][1]["cu_seq_lens_q"] is bounds


def test_a_windowed_layer_has_no_comparable_attention():
    adapter = fresh("qwen2_5_vl")
    assert adapter.tower_attention(None) is adapter.tower.blocks[3].attn
    assert adapter.tower_attention(-3) is adapter.tower.blocks[1].attn
    for layer, number in ((0, 0), (-2, 2), (4, 4), (-5, -1)):
        with pytest.raises(
            UserError, match=rf"tower layer {number} of model='tiny' .*valid: 1, 3$"
        ):
            adapter.tower_attention(layer)
    with pytest.raises(UserError, match=r"valid: 0, 1$"):
        fresh("qwen2_vl").tower_attention(2)


def test_merged_features_are_projected_as_the_tower_does(adapter):
    patches = torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = adapter.projector(patches)
        features = adapter.features(patches)
        assert features.shape == (6, 128)
        assert torch.equal(adapter.project(features), expected)
        assert (adapter.project(features[[4, 1]]) - expected[[4, 1]]).abs().max() < 1e-6


# ---------------------------------------------------------------------- positions and time


def prompt_positions(adapter, inputs):
    """The (axes, B, L) positions that enter the decoder at the prefill of `generate`."""
    with calls_of(adapter.decoder) as calls, torch.inference_mode():
        adapter.model.generate(**inputs, **ONE_TOKEN)
    return calls[0].kwargs["position_ids"]


def expected_positions(adapter, inputs, row, seconds):
    """Return time, height and width by hand: each part starts after the largest position before it."""
    config = adapter.model.config
    ids = inputs["input_ids"][row][inputs["attention_mask"][row].bool()].tolist()
    shapes = {
        config.image_token_id: iter(inputs.get("image_grid_thw", torch.zeros(0, 3)).tolist()),
        config.video_token_id: iter(inputs.get("video_grid_thw", torch.zeros(0, 3)).tolist()),
    }
    positions, at, start = [], 0, 0
    while at < len(ids):
        if ids[at] not in shapes:
            positions.append([start] * 3)
            at, start = at + 1, start + 1
            continue
        frames, rows, columns = (
            size // step for size, step in zip(next(shapes[ids[at]]), (1, 2, 2), strict=True)
        )
        pace = seconds * 2 if ids[at] == config.video_token_id else 1
        for frame in range(frames):
            positions += [
                [start + int(frame * pace), start + r, start + c]
                for r in range(rows)
                for c in range(columns)
            ]
        at, start = at + frames * rows * columns, max(map(max, positions)) + 1
    return torch.tensor(positions).T


#: Two frames of each video span: 2 / (4 of 5 frames at 8 a second), 2 / (6 of 40), 2 / (4 of 12).
SECONDS = (2 / (4 / 5 * 8), 2 / (6 / 40 * 8), 2 / (4 / 12 * 8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_video_positions_follow_the_clock(name, dtype):
    """Qwen2.5-VL gives two position steps a second, whatever the model's dtype; Qwen2-VL one step a frame pair."""
    adapter = fresh(name, dtype=dtype)
    paced = name == "qwen2_5_vl"
    for item, seconds in zip(VIDEOS, SECONDS, strict=True):
        inputs = adapter.encode([item])
        if paced:
            assert inputs["second_per_grid_ts"] == pytest.approx([seconds], rel=1e-6)
        at = prompt_positions(adapter, inputs)
        expected = expected_positions(adapter, inputs, 0, seconds if paced else 0.5)
        assert torch.equal(at[1:, 0], expected)
    steps = [int(frame * SECONDS[1] * 2) for frame in range(3)] if paced else [0, 1, 2]
    visual = adapter.layout(adapter.encode([VIDEOS[1]])).visual[0]
    at = prompt_positions(adapter, adapter.encode([VIDEOS[1]]))[1, 0, visual]
    assert sorted(set((at - at.min()).tolist())) == steps


def test_each_pair_of_frames_stands_behind_its_time():
    """Qwen3-VL: the words of a time, midway between a pair of frames, then the pair as if it were one picture."""
    adapter = fresh("qwen3_vl")
    times = (("0.1", "0.4"), ("0.5", "2.4", "4.4"), ("0.2", "1.1"))
    for item, moments in zip(VIDEOS, times, strict=True):
        inputs = adapter.encode([item])
        frames, rows, columns = inputs["video_grid_thw"][0].tolist()
        pairs = len(moments)
        pads = "<|video_pad|>" * (rows * columns // 4)
        expected_text = "".join(
            f"<{at} seconds><|vision_start|>{pads}<|vision_end|>" for at in moments
        )
        text = item[0]["content"][-1]["text"]
        assert frames == pairs
        assert adapter.processor.tokenizer.decode(inputs["input_ids"][0]) == (
            f"<|im_start|>user\n{expected_text}{text}<|im_end|>\n<|im_start|>assistant\n"
        )
        grids = {**inputs, "video_grid_thw": torch.tensor([[1, rows, columns]] * pairs)}
        expected = expected_positions(adapter, grids, 0, 0.0)
        assert torch.equal(prompt_positions(adapter, inputs)[1:, 0], expected)
        assert adapter.layout(inputs).grid[0][:, 0].unique().tolist() == list(range(frames))


def test_times_are_those_of_the_frames_that_were_taken():
    """Every tenth of forty frames, eight a second: the middles of the pairs lie by these numbers."""
    adapter = fresh("qwen3_vl", video=VideoSpec(frames=4))
    inputs = adapter.encode([video_chat("w1", clip(40, 28, 42))])
    text = adapter.processor.tokenizer.decode(inputs["input_ids"][0])
    indices = [0, 13, 26, 39]
    middles = [(a + b) / 2 / 8 for a, b in (indices[:2], indices[2:])]
    assert re.findall(r"<([0-9.]+) seconds>", text) == [f"{middle:.1f}" for middle in middles]


def test_rows_of_a_padded_batch_keep_their_own_clock():
    adapter = fresh("qwen2_5_vl")
    batch = adapter.encode(VIDEOS)
    together = prompt_positions(adapter, batch)
    for row, item in enumerate(VIDEOS):
        single = prompt_positions(adapter, adapter.encode([item]))
        assert torch.equal(together[1:, row, batch["attention_mask"][row].bool()], single[1:, 0])


def test_the_last_of_an_odd_number_of_frames_is_doubled(name):
    adapter = fresh(name, video=VideoSpec(frames=3))
    inputs = adapter.encode([video_chat("w1", clip(40, 28, 42))])
    assert inputs["video_grid_thw"].tolist() == [[2, 4, 6]]
    assert adapter.layout(inputs).counts == (12,)
    last = inputs["pixel_values_videos"].view(2, 24, 3, 2, 49)[1]
    assert torch.equal(last[:, :, 0], last[:, :, 1])
    first = inputs["pixel_values_videos"].view(2, 24, 3, 2, 49)[0]
    assert not torch.equal(first[:, :, 0], first[:, :, 1])
    if name == "qwen2_5_vl":
        assert inputs["second_per_grid_ts"] == pytest.approx([2 / (3 / 40 * 8)])


# ---------------------------------------------------------------------- prompts, sizes, configurations


def test_the_prompt_is_qwens(name):
    prompt = fresh(name).render(MIXED[0])
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    film = "<|vision_start|><|video_pad|><|vision_end|>"
    if name == "qwen3_vl":
        system, film = "", "<|video_pad|>"
    assert prompt == (
        f"{system}<|im_start|>user\n{film}<|vision_start|><|image_pad|><|vision_end|>"
        "w1<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("source", ["random", "saved"])
def test_bounds_of_the_processor_are_kept(name, source, folders):
    """In units of 14x14 pixels: a picture of 4x4 of them, and frames of 3x4, are scaled into 4 to 6 and 8 to 9.

    Qwen3-VL's bounds of a video are those of all its frames together, here four.
    """
    frames = 4 if name == "qwen3_vl" else 1
    few = {
        "min_pixels": 196,
        "max_pixels": 6 * 196,
        "video_min_pixels": 196,
        "video_max_pixels": frames * 9 * 196,
    }
    spec = replace(SPECS[name], processor=few)
    adapter = load_adapter(spec) if source == "random" else load_tiny(spec, folders[name])
    assert adapter.layout(adapter.encode([chat("w1", picture(0, 56, 56))])).counts == (4,)
    assert adapter.layout(adapter.encode([video_chat("w1", clip(5, 42, 56))])).counts == (12,)


def test_each_frame_is_bounded_where_that_is_asked_for(folders):
    """Four frames of 560x560 pixels, 14x14 a token: whole under a video's bound, 27x27 tokens under a frame's."""
    wide = {**BOUNDS, "video_max_pixels": 4 * 560 * 560}
    for setting, counts in (({}, 2 * 40**2), ({"cap_pixels_per_frame": True}, 2 * 27**2)):
        adapter = load_tiny(replace(QWEN3, processor={**wide, **setting}), folders["qwen3_vl"])
        assert adapter.layout(adapter.encode([video_chat("w1", clip(5, 560, 560))])).counts == (
            counts,
        )


@pytest.mark.parametrize("stated", [None, False, True])
def test_what_a_processor_states_of_frames_stays_unless_a_setting_says_otherwise(
    name, stated, folders, tmp_path
):
    """In a checkpoint's files and in memory; the library's own default bounds no frame."""
    folder = shutil.copytree(folders[name], tmp_path / "model")
    files = [path for path in folder.glob("*.json") if "video_processor" in path.read_text()]
    assert files
    for file in files:
        config = json.loads(file.read_text())
        config.get("video_processor", config)["cap_pixels_per_frame"] = stated
        file.write_text(json.dumps(config))
    for setting in (None, False, True):
        chosen = {} if setting is None else {"cap_pixels_per_frame": setting}
        spec = replace(SPECS[name], processor={**BOUNDS, **chosen})
        loaded = load_tiny(spec, folder)
        adopted = type(loaded).adopt_processor(AutoProcessor.from_pretrained(folder), spec)
        for processor in (loaded.processor, adopted):
            bounds = processor.video_processor.cap_pixels_per_frame
            assert bounds is (bool(stated) if setting is None else setting)


@pytest.mark.parametrize("file", ["qwen2_vl_7b", "qwen2_5_vl_3b", "qwen3_vl_2b"])
def test_models_bound_frames_as_lmms_eval_does_and_qwen3_under_hub_as_released(file):
    assert [
        build_spec(cell).model.processor["cap_pixels_per_frame"]
        for cell in commands.cells_of("-m", f"model={file}", "model.prompt=original,lmms_eval,hub")
    ] == [True, True, file != "qwen3_vl_2b"]


def test_unknown_and_impossible_settings_of_the_processor_are_refused(name):
    with pytest.raises(UserError, match=r"cap_pixels_per_frame='yes' must be true or false"):
        fresh(name, processor={**BOUNDS, "cap_pixels_per_frame": "yes"})
    with pytest.raises(UserError, match=r"model\.processor='max_pixel' is unknown .*max_pixels"):
        fresh(name, processor={**BOUNDS, "max_pixel": 4})
    with pytest.raises(UserError, match=r"model\.processor\.min_pixels='few' must be"):
        fresh(name, processor={**BOUNDS, "min_pixels": "few"})


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 8, 12, 31, 32])
def test_the_last_block_spans_the_image_at_every_scale(layers):
    spec = model("qwen2_5_vl_7b")
    facts = spec.facts.scaled(1, layers)
    config = ADAPTERS.load(spec.adapter).configuration(replace(spec, facts=facts), byte_tokenizer())
    blocks = config.vision_config.fullatt_block_indexes
    assert blocks[-1] == layers - 1
    assert len(set(blocks)) == layers - facts.tower.window_layers


def model(name):
    return model_of(f"model={name}")


@pytest.mark.parametrize(
    ("file", "billions"),
    [
        ("qwen2_vl_7b", 8.29),
        ("qwen2_5_vl_3b", 3.75),
        ("qwen2_5_vl_7b", 8.29),
        ("qwen2_5_vl_32b", 33.45),
    ],
)
def test_config_files_build_the_published_architectures(file, billions):
    """The sizes on the models' cards; nothing is allocated."""
    spec = model(file)
    built = full_model(spec)
    config = built.config
    assert sum(item.numel() for item in built.parameters()) / 1e9 == pytest.approx(
        billions, abs=0.005
    )
    assert sum(item.numel() for item in built.model.visual.parameters()) / 1e6 == pytest.approx(
        679, abs=11
    )
    assert set(config.text_config.layer_types) == {"full_attention"}
    widths = [
        layer.in_features for layer in built.model.visual.merger.mlp if isinstance(layer, nn.Linear)
    ]
    assert (*widths, config.text_config.hidden_size) == spec.facts.projector
    if "2_5" in file:
        assert config.vision_config.fullatt_block_indexes == [7, 15, 23, 31]
        assert config.vision_config.window_size == 112


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("file", "parameters"),
    [
        ("qwen3_vl_2b", 2_127_532_032),
        ("qwen3_vl_4b", 4_437_815_808),
        ("qwen3_vl_8b", 8_767_123_696),
        ("qwen3_vl_30b_a3b", 31_070_754_032),
        ("qwen3_vl_235b_a22b", 235_670_022_896),
    ],
)
def test_config_files_of_qwen3_build_as_many_parameters_as_the_hub_counts(file, parameters):
    built = full_model(model(file))
    assert sum(item.numel() for item in built.parameters()) == parameters
    assert built.config.text_config.rope_parameters["mrope_section"] == [24, 20, 20]


def test_scaled_towers_hand_over_the_layers_that_are_left():
    facts = model("qwen3_vl_8b").facts
    layers_left = [facts.scaled(1, layers).deepstack for layers in (9, 1, None)]
    assert layers_left == [(8,), (), (8, 16, 24)]


def test_statistics_of_routers_are_off_and_change_nothing(tmp_path):
    folder = save_tiny(QWEN3_MOE, tmp_path)
    logits = []
    for wanted in (False, True):
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["output_router_logits"] = wanted
        (folder / "config.json").write_text(json.dumps(config))
        adapter = load_tiny(QWEN3_MOE, folder)
        inputs = adapter.encode(IMAGES)
        with Session(adapter, Recorder(), Budget("kept", 0.5)) as session:
            logits.append(session.generate(inputs, max_new_tokens=3, output_logits=True).logits)
    assert torch.equal(*logits)


def test_a_mixture_of_experts_is_refused_by_the_file_of_a_dense_model(folders, tmp_path):
    folder = shutil.copytree(folders["qwen3_vl"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_vl_moe"}))
    with pytest.raises(UserError, match=r"is of type 'qwen3_vl_moe', valid: 'qwen3_vl'"):
        load_tiny(QWEN3, folder)
