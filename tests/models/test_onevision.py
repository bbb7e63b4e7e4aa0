"""LLaVA-OneVision and LLaVA-Video: pooled frames, newlines, signals without a class token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import avg_pool2d, interpolate

from espalier.harness.engine.layout import mix
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.harness.models.architectures.anyres_views import Pooling
from espalier.harness.models.build_adapter import load_adapter
from espalier.methods.base import Need, Site
from tests.families.onevision import (
    FAMILIES,
    ONEVISION,
    VIDEO,
    architecture,
    video,
    watch,
)
from tests.family_runs import NONE, Tiny, calls_of, shown
from tests.tiny import Recorder, load_tiny, picture, save_tiny

NAMES = list(FAMILIES)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    result = {}

    def loaded(name, dtype="float32", attention="sdpa"):
        if name not in result:
            result[name] = save_tiny(FAMILIES[name].spec, tmp_path_factory.mktemp(name))
        return load_tiny(FAMILIES[name].spec, result[name], dtype, attention)

    return loaded


def watched(adapter, inputs):
    """Run the plain model; return the projector's outputs by call, and the decoder's input."""
    with (
        calls_of(adapter.projector) as projected,
        calls_of(adapter.decoder) as decoded,
        torch.inference_mode(),
    ):
        adapter.model(**inputs)
    units = torch.cat([call.output.flatten(0, -2) for call in projected])
    return units, decoded[0].kwargs["inputs_embeds"]


# ---------------------------------------------------------------------- layout


@pytest.mark.parametrize("name", NAMES)
def test_visual_tokens_are_mixtures_of_their_units_and_the_rest_newlines(load, name):
    """The layout's unit of each placeholder equals the one in the model's input."""
    adapter = load(name, "float64")
    inputs = adapter.encode(list(FAMILIES[name].chats))
    layout = adapter.layout(inputs)
    units, embeddings = watched(adapter, inputs)
    newline = adapter.model.model.image_newline
    placeholders = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    for token in adapter.items(inputs):
        placeholders |= inputs["input_ids"] == token
    for row, count in enumerate(layout.counts):
        visual = layout.visual[row, :count]
        share = None if layout.share is None else layout.share[row, :count]
        expected = mix(units, layout.source[row, :count], share)
        assert (embeddings[row, visual] - expected).abs().max() <= 1e-6 * expected.abs().max()
        special = placeholders[row].clone()
        special[visual] = False
        assert int(special.sum()) == layout.special[row] > 0
        assert torch.equal(embeddings[row, special], newline.expand(layout.special[row], -1))
    assert len(units) == sum(work.units for work in layout.work)


@pytest.mark.parametrize("name", NAMES)
def test_every_view_of_every_picture_is_a_rectangle(load, name):
    adapter = load(name)
    layout = adapter.layout(adapter.encode(list(FAMILIES[name].chats)))
    for row, count in enumerate(layout.counts):
        grid = layout.grid[row, :count]
        assert grid[:, 0].unique().tolist() == list(range(int(grid[:, 0].max()) + 1))
        for image, view in grid[:, :2].unique(dim=0).tolist():
            places = grid[(grid[:, 0] == image) & (grid[:, 1] == view), 2:]
            height, width = (places.max(0).values + 1).tolist()
            raster = torch.cartesian_prod(torch.arange(height), torch.arange(width))
            assert torch.equal(places, raster)


def pooled_as_published(frames, side, how):
    """Pool (F, side * side, C) features."""
    plane = frames.transpose(1, 2).unflatten(2, (side, side))
    if how == "average":
        return avg_pool2d(plane, 2).flatten(2).transpose(1, 2)
    small = (side + 1) // 2
    return interpolate(plane, (small, small), mode="bilinear").flatten(2).transpose(1, 2)


@pytest.mark.parametrize(
    ("side", "how", "pooled"),
    [
        (27, "bilinear", 14),
        (27, "average", 13),
        (5, "average", 2),
        (5, "bilinear", 3),
        (4, "bilinear", 2),
    ],
)
@pytest.mark.parametrize("row_newlines", [False, True])
def test_pooled_frames_are_traced_to_their_units(side, how, pooled, row_newlines):
    pooling = Pooling.measure(lambda frames: pooled_as_published(frames, side, how), side**2)
    assert pooling.side == pooled
    features = torch.randn(10 + 3 * side**2, 5, dtype=torch.float64)
    item = pooling.item(3, 10, row_newlines)
    expected = pooled_as_published(features[10:].view(3, side**2, 5), side, how).flatten(0, 1)
    assert (mix(features, item.source, item.share)[item.prunable] - expected).abs().max() < 1e-9
    assert item.work.units == item.work.tokens == 3 * side**2
    assert item.work.pairs == 3 * side**4
    assert len(item) == 3 * pooled**2 + (3 * pooled if row_newlines else 1)
    frame, _, row, column = item.grid[item.prunable].T
    assert torch.equal(frame * pooled**2 + row * pooled + column, torch.arange(3 * pooled**2))


@pytest.mark.parametrize("how", ["average", "bilinear"])
def test_llava_video_ends_each_row_of_each_frame_with_a_newline(how):
    """Loops over frames, rows and columns in place of tensor operations; 5 x 5 patches give 2 x 2 or 3 x 3 tokens."""
    adapter = load_adapter(replace(VIDEO, processor={"video_pooling": how}))
    inputs = adapter.encode([watch("w", video(0))])
    units, embeddings = watched(adapter, inputs)
    side, small = 5, {"average": 2, "bilinear": 3}[how]
    expected = []
    for frame in units.view(3, side, side, -1):
        for row in range(small):
            for column in range(small):
                if how == "average":
                    patch = frame[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
                    expected.append(patch.flatten(0, 1).mean(0))
                else:  # 5 to 3: centres at 1/3, 2 and 11/3
                    places = [(0, 1, 1 / 3), (2, 2, 0.0), (3, 4, 2 / 3)]
                    (top, bottom, down), (left, right, across) = places[row], places[column]
                    upper = frame[top, left] * (1 - across) + frame[top, right] * across
                    lower = frame[bottom, left] * (1 - across) + frame[bottom, right] * across
                    expected.append(upper * (1 - down) + lower * down)
            expected.append(adapter.model.model.image_newline.detach())
    placeholders = inputs["input_ids"][0] == adapter.model.config.video_token_id
    assert int(placeholders.sum()) == len(expected) == 3 * small * (small + 1)
    assert (embeddings[0, placeholders] - torch.stack(expected)).abs().max() < 1e-6


def test_images_of_llava_video_are_packed_as_in_onevision(load):
    adapter = load("llava_video", "float64")
    inputs = adapter.encode([watch("w1 w2", video(0), picture(1, 35, 35)), watch("w3", video(1))])
    layout = adapter.layout(inputs)
    units, embeddings = watched(adapter, inputs)
    assert layout.counts == (25 + 25 + 3 * 4, 3 * 4)
    for row, count in enumerate(layout.counts):
        expected = mix(units, layout.source[row, :count], layout.share[row, :count])
        at = layout.visual[row, :count]
        assert (embeddings[row, at] - expected).abs().max() <= 1e-6 * expected.abs().max()


# ---------------------------------------------------------------------- signals


def signals_of(adapter, chats, *names):
    (view,) = shown(adapter, [Site("layer", 2)], [*map(Need, names)], chats)
    return {key: value[0] for key, value in view.signals.items()}


def blended(adapter, inputs, values):
    """Send (units, C) values through the model's own packing and pooling; return those of the prunable tokens."""
    model, blends = adapter.model.model, []
    newline = torch.full(values.shape[-1:], torch.nan)
    items = adapter.items(inputs)
    images, videos = (items[model.config.image_token_id], items[model.config.video_token_id])
    side = model.config.vision_config.image_size // model.config.vision_config.patch_size
    values = values.split([item.work.units for item in (*images, *videos)])
    for n, weight in enumerate(values):
        if n < len(images):
            tiles = weight.view(-1, side**2, weight.shape[-1])
            size = inputs["image_sizes"][n : n + 1]
            tokens = model.pack_image_features([tiles], size, newline, "anyres_max_2")[0][0]
        else:
            how = getattr(model.config, "video_pooling", "bilinear")
            tokens = pooled_as_published(
                weight.view(-1, side**2, weight.shape[-1]), side, how
            ).flatten(0, 1)
        blends.append(tokens[~tokens.isnan().all(1)])
    order = inputs["input_ids"][0]
    starts = [(order == token).nonzero()[:1, 0] for token in items if bool((order == token).any())]
    if len(starts) == 2 and starts[0] > starts[1]:  # the video stands before the picture
        blends = [*blends[len(images) :], *blends[: len(images)]]
    return torch.cat(blends)


@pytest.mark.parametrize("name", NAMES)
def test_tower_signals_equal_eager_attention(load, name):
    """Mean attention received and mean keys, blended as the model blends features."""
    sdpa, eager = load(name), load(name, attention="eager")
    for item in FAMILIES[name].chats:
        signals = signals_of(sdpa, [item], "cls_attention", "tower_keys")
        inputs = eager.encode([item])
        layer = eager.tower_attention(None)
        assert layer is eager.tower.encoder.layers[-1].self_attn
        with calls_of(layer) as maps, calls_of(layer.k_proj) as keys, torch.inference_mode():
            eager.model(**inputs)
        received = torch.cat([call.output[1].mean(1).mean(1).flatten() for call in maps])
        expected = blended(eager, inputs, received.unsqueeze(1))[:, 0]
        assert (signals["cls_attention"] - expected).abs().max() <= 5e-6
        heads = torch.cat(
            [call.output.unflatten(-1, (4, 8)).mean(-2).flatten(0, 1) for call in keys]
        )
        expected = blended(eager, inputs, heads)
        assert (signals["tower_keys"] - expected).abs().max() <= 5e-6 * expected.abs().max()


@pytest.fixture(scope="module")
def with_head(tmp_path_factory):
    """A tower that kept its pooling head."""
    vision = {**architecture()["vision"], "vision_use_head": True}
    spec = replace(
        ONEVISION,
        facts=replace(ONEVISION.facts, class_attention="probe"),
        architecture={**architecture(), "vision": vision},
    )
    return load_tiny(spec, save_tiny(spec, tmp_path_factory.mktemp("head")), "float32")


@pytest.mark.parametrize("name", ["onevision_image", "onevision_video"])
def test_probe_is_what_the_pooling_head_pays_each_patch(with_head, name):
    head = with_head.tower.head
    for item in FAMILIES[name].chats:
        signals = signals_of(with_head, [item], "cls_attention")["cls_attention"]
        inputs = with_head.encode([item])
        with calls_of(with_head.tower.post_layernorm) as states, torch.inference_mode():
            with_head.model(**inputs)
            pooled = torch.cat([call.output for call in states])
            query = head.probe.expand(len(pooled), -1, -1)
            weights = head.attention(query, pooled, pooled, need_weights=True)[1]
        expected = blended(with_head, inputs, weights[:, 0].reshape(-1, 1))[:, 0]
        assert (signals - expected).abs().max() <= 5e-6
        assert signals.std() > 0.1 * signals.mean()  # not flat


def test_the_head_is_left_without_hooks(with_head):
    recorder = Recorder((Site("layer", 2),), (Need("cls_attention"),))
    with Session(with_head, recorder, NONE):
        assert len(with_head.tower.head.attention._forward_pre_hooks) == 1
    assert not with_head.tower.head.attention._forward_pre_hooks


def test_probe_needs_a_head():
    spec = replace(ONEVISION, facts=replace(ONEVISION.facts, class_attention="probe"))
    recorder = Recorder((Site("layer", 2),), (Need("cls_attention"),))
    with pytest.raises(UserError, match=r"model.facts.class_attention='probe'.*valid: mean"):
        Session(load_adapter(spec), recorder, NONE)


# ---------------------------------------------------------------------- prompts and errors


def test_prompt_is_the_format_that_the_family_was_trained_with():
    assert load_adapter(ONEVISION).render(watch("How many?", video(0), picture(1))) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<video> <image>\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_time_instruction_says_when_each_frame_is_shown():
    """Six frames at 4 a second: 1.5 seconds; frames 0, 2 and 5 are taken. Nine frames: 0, 4 and 8."""
    adapter = load_adapter(replace(VIDEO, processor={"time_instruction": True}))
    inputs = adapter.encode([watch("What?", video(1), video(2, frames=9)), watch("Why?", video(1))])
    texts = [
        adapter.processor.tokenizer.decode(row[row != adapter.model.config.video_token_id])
        for row in inputs["input_ids"]
    ]
    sentence = (
        "\nThe video lasts for {} seconds, and 3 frames are uniformly sampled from it. These frames are located at {}."
        "Please answer the following questions related to this video.\n"
    )
    short = sentence.format("1.50", "0.00s,0.50s,1.25s")
    assert f"user\n{short}{sentence.format('2.25', '0.00s,1.00s,2.00s')}What?<|im_end|>" in texts[0]
    assert f"user\n{short}Why?<|im_end|>" in texts[1]
    plain = load_adapter(VIDEO).encode([watch("What?", video(1))])
    assert "lasts" not in adapter.processor.tokenizer.decode(plain["input_ids"][0])


def test_videos_of_different_lengths_are_refused_in_one_batch():
    adapter = load_adapter(
        replace(ONEVISION, video=replace(ONEVISION.video, frames=6, short="all"))
    )
    chats = [watch("a", video(0, frames=5)), watch("b", video(1, frames=9))]
    with pytest.raises(UserError, match=r"videos of 5 and 6 frames.*engine.batch_size=1"):
        adapter.encode(chats)
    assert adapter.layout(adapter.encode(chats[:1])).counts == (5 * 4,)
    assert adapter.layout(adapter.encode(chats[1:])).counts == (6 * 4,)


def test_unknown_settings_are_refused():
    with pytest.raises(UserError, match=r"model.processor='do_pad' is unknown"):
        load_adapter(replace(ONEVISION, processor={"do_pad": True}))
    with pytest.raises(UserError, match=r"video_pooling='max' is unknown.*average, bilinear"):
        load_adapter(replace(VIDEO, processor={"video_pooling": "max"}))


@pytest.mark.parametrize("name", ["onevision_image", "onevision_video", "llava_video"])
def test_the_projector_reads_the_last_layer_before_the_towers_last_norm(name):
    """As the releases do; some versions of the library put the normed states in that place."""
    tiny = Tiny(name, "float32")
    adapter = tiny.adapter
    with (
        calls_of(adapter.tower_layers()[-1]) as last,
        calls_of(adapter.projector) as projector,
        torch.inference_mode(),
    ):
        adapter.model.generate(**tiny.inputs(0), max_new_tokens=1, do_sample=False)
    states = last[0].output
    assert torch.equal(states[0] if isinstance(states, tuple) else states, projector[0].args[0])
