"""InternVL: positions of units, tiles and frames, signals per unit of 2 x 2 patches, and the published sizes."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from PIL import Image

from espalier.harness.errors import UserError
from espalier.harness.models.build_adapter import load_adapter, random_processor
from espalier.harness.models.families import ADAPTERS
from espalier.methods.base import Need, Site
from tests.families.internvl import LLAMA, QWEN, QWEN3, VIDEOS
from tests.families.onevision import video, watch
from tests.family_runs import calls_of, placed_units, shown
from tests.tiny import (
    IMAGE,
    SHAPES,
    chat,
    full_model,
    load_tiny,
    model_of,
    picture,
    save_tiny,
)

SPECS = {"internvl": QWEN, "internvl_6b": LLAMA}
#: Pictures of one tile and of several, videos of two and three frames, and both in one chat.
CHATS = (*SHAPES, *VIDEOS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: save_tiny(spec, tmp_path_factory.mktemp(name)) for name, spec in SPECS.items()}


def fresh(**changes):
    """A model with random weights that a test may take apart."""
    return load_adapter(replace(QWEN, **changes))


def painted(rows, columns):
    """A picture of `rows` x `columns` squares of a tile's size, each of its own grey."""
    shades = torch.arange(1, rows * columns + 1).view(rows, columns) * 30
    pixels = shades.repeat_interleave(IMAGE, 0).repeat_interleave(IMAGE, 1).to(torch.uint8)
    return Image.fromarray(pixels.numpy()).convert("RGB")


# ---------------------------------------------------------------------- which unit is which token


@pytest.fixture
def adapter():
    return fresh()


def test_every_unit_lands_on_the_placeholder_that_the_layout_says(adapter):
    """The projector's outputs are replaced by their number; the model scatters them over pictures and frames."""
    inputs = adapter.encode(CHATS)
    layout = adapter.layout(inputs)
    assert placed_units(adapter, inputs) == 4 * len(inputs["pixel_values"])
    assert (layout.share, layout.special) == (None, (0,) * len(CHATS))
    assert [work.units for work in layout.work] == list(layout.counts)
    tiles = [count // 4 for count in layout.counts]
    assert [work.tokens for work in layout.work] == [17 * n for n in tiles]
    assert [work.pairs for work in layout.work] == [17 * 17 * n for n in tiles]


def test_every_unit_holds_the_patches_of_its_grid_place(adapter):
    """The tower's output is replaced by the number of each patch; pixel shuffle puts four of them side by side."""
    inputs = adapter.encode([chat("w1", picture(0, 56, 28))])
    numbers = torch.arange(3 * 17).float().view(3, 17, 1).repeat(1, 1, adapter.facts.tower.hidden)
    adapter.tower.layernorm.register_forward_hook(lambda module, args, output: numbers)
    with calls_of(adapter.projector) as calls, torch.inference_mode():
        adapter.model(**inputs)
    units = adapter.features(calls[0].args[0])
    layout = adapter.layout(inputs)
    order = [1, 2, 0]  # the tile that view v is: crops first, thumbnail last
    for place, source in zip(layout.grid[0].tolist(), layout.source[0, :, 0], strict=True):
        image, view, row, column = place
        first = 17 * order.index(view) + 1  # after the class token
        expected = [first + 4 * (2 * row + r) + 2 * column + c for r in (0, 1) for c in (0, 1)]
        assert (image, sorted(set(units[source].tolist()))) == (0, expected)
    values = adapter.to_units(numbers[:, 1:, 0])
    assert torch.equal(values, units.mean(1))
    assert torch.equal(adapter.to_units(numbers[:, 1:])[:, 0], values)


@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (3, 1), (2, 3), (2, 2)])
def test_views_are_crops_in_raster_order_then_the_thumbnail(adapter, rows, columns):
    inputs = adapter.encode([chat("w1", painted(rows, columns))])
    n_tiles = rows * columns
    assert adapter.layout(inputs).grid[0, ::4, 1].tolist() == [*range(1, n_tiles + 1), 0]
    spread = inputs["pixel_values"].flatten(2).std(2).mean(1)
    shade = inputs["pixel_values"].mean((1, 2, 3))
    assert (spread[:-1] < 0.05).all()  # one crop, one shade
    assert spread[-1] > 0.05  # the thumbnail has all
    assert (shade[1:-1] > shade[:-2]).all()
    layout = adapter.layout(inputs)
    assert torch.equal(layout.tile, layout.grid[..., 1])


def test_a_small_picture_is_one_tile_and_crops_can_be_turned_off(adapter):
    assert adapter.layout(adapter.encode([chat("w1", 0)])).grid[0, :, 1].tolist() == [0] * 4
    uncropped = fresh(processor={"crop_to_patches": False})
    assert uncropped.layout(uncropped.encode([chat("w1", painted(2, 3))])).counts == (4,)
    few = fresh(processor={"max_patches": 2})
    assert few.layout(few.encode([chat("w1", painted(2, 3))])).counts == (12,)


def test_frames_are_images_of_one_tile_named_in_the_prompt(adapter):
    inputs = adapter.encode([watch("w1", video(1), picture(1, 56, 28))])
    layout = adapter.layout(inputs)
    assert layout.grid[0, ::4, :2].tolist() == [[0, 0], [1, 0], [2, 0], [3, 1], [3, 2], [3, 0]]
    prompt = adapter.processor.tokenizer.decode(inputs["input_ids"][0])
    holders = "<img>" + "<IMG_CONTEXT>" * 4 + "</img>"
    assert "\n".join(f"Frame{n}: {holders}" for n in (1, 2, 3)) in prompt
    still = Image.fromarray(torch.full((28, 28, 3), 90, dtype=torch.uint8).numpy())
    single = adapter.encode([chat("w1", still)])["pixel_values"]
    pixels = adapter.processor.video_processor([still], return_tensors="pt")["pixel_values_videos"]
    assert (single - pixels[0]).abs().max() < 1e-6  # the size and colours of a picture


def test_videos_of_other_lengths_cannot_share_a_chat_and_loose_placeholders_are_refused(
    adapter,
):
    with pytest.raises(UserError, match=r"videos of 2 and 3 frames.*model\.video\.frames"):
        adapter.encode([watch("w1", video(0, frames=2), video(1))])
    ids = adapter.encode([chat("w1", 0)])["input_ids"]
    loose = torch.cat([ids[:, :4], ids.new_full((1, 1), adapter.model.config.image_token_id)], 1)
    with pytest.raises(UserError, match="placeholders"):
        adapter.layout(
            {"input_ids": loose, "attention_mask": torch.ones_like(loose), "pixel_values": None}
        )


# ---------------------------------------------------------------------- signals


@pytest.mark.parametrize("name", SPECS)
def test_tower_signals_equal_eager_maps_and_captured_keys(folders, name):
    needs = tuple(
        Need(signal, layer) for signal in ("cls_attention", "tower_keys") for layer in (None, 0, 1)
    )
    sdpa = load_tiny(SPECS[name], folders[name], "float32")
    eager = load_tiny(SPECS[name], folders[name], "float32", "eager")
    for shapes in (SHAPES[1], VIDEOS[1]):
        inputs = sdpa.encode([shapes])
        signals = shown(sdpa, [Site("vision")], needs, [shapes])[0].signals
        with ExitStack() as stack:
            # The norm of the keys is the identity in the tower without it.
            norms = [layer.attention.k_norm for layer in eager.tower.encoder.layer]
            keys = [stack.enter_context(calls_of(norm)) for norm in norms]
            stack.enter_context(torch.inference_mode())
            maps = eager.tower(inputs["pixel_values"], output_attentions=True).attentions
        blocks = [
            [1 + 4 * (2 * row + r) + 2 * column + c for r in (0, 1) for c in (0, 1)]
            for row in (0, 1)
            for column in (0, 1)
        ]
        for layer, suffix in ((0, "@0"), (1, "@1"), (1, "")):
            attended = maps[layer][:, :, 0].mean(1)[:, blocks].mean(-1).flatten()
            spread = (attended - attended.mean()).abs().max()
            assert (signals[f"cls_attention{suffix}"][0] - attended).abs().max() <= 5e-6
            assert (
                layer == 0 or spread > 1e-4
            )  # a class token that starts at zero looks at all alike
            heads = keys[layer][0].output.unflatten(-1, (4, 8)).mean(2)
            expected = heads[:, blocks].mean(2).flatten(0, 1)
            assert (signals[f"tower_keys{suffix}"][0] - expected).abs().max() <= 5e-6


# ---------------------------------------------------------------------- text stacks


def test_a_text_stack_of_experts_is_refused_by_name(tmp_path):
    """InternVL3.5 has such sizes; their checkpoints are of the family's own type."""
    folder = save_tiny(QWEN3, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["model_type"] = "qwen3_moe"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"text stack is of type 'qwen3_moe'; valid: qwen2, qwen3"):
        load_tiny(QWEN3, folder)
    text = {**QWEN3.architecture["text"], "model_type": "qwen3_moe"}
    with pytest.raises(UserError, match=r"text stack is of type 'qwen3_moe'"):
        load_adapter(replace(QWEN3, architecture={**QWEN3.architecture, "text": text}))


# ---------------------------------------------------------------------- real sizes


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("internvl2_1b", 938),
        ("internvl2_4b", 4147),
        ("internvl2_8b", 8075),
        ("internvl2_26b", 25514),
        ("internvl2_5_8b", 8075),
        ("internvl3_1b", 938),
        ("internvl3_2b", 2089),
        ("internvl3_8b", 7944),
        ("internvl3_14b", 15117),
        ("internvl3_5_1b", 1061),
        ("internvl3_5_4b", 4732),
        ("internvl3_5_8b", 8528),
    ],
)
def test_the_config_file_builds_the_released_architecture(name, millions):
    spec = model_of(f"model={name}")
    model = full_model(spec)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions
    projector = model.model.multi_modal_projector
    widths = (projector.linear_1.in_features, projector.linear_1.out_features)
    assert (*widths, projector.linear_2.out_features) == spec.facts.projector
    assert model.config.image_seq_length == (448 // 14 // 2) ** 2
    processor = random_processor(ADAPTERS.load(spec.adapter), spec)
    pixels = processor.image_processor(picture(0, 900, 600), crop_to_patches=True)
    assert pixels["num_patches"] == [7]  # 3 x 2 crops of 448 pixels and the thumbnail
    assert pixels["pixel_values"][0].shape == (3, 448, 448)
    assert processor.video_processor.size.height == 448
