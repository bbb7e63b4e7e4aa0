"""AnyRes packing: projector units of every token, compared with the model's packing and by hand."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import interpolate
from transformers import LlavaOnevisionConfig, LlavaOnevisionModel
from transformers.models.llava_onevision.modeling_llava_onevision import get_anyres_image_grid_shape

from espalier.harness.engine.layout import mix
from espalier.harness.models.architectures.anyres_views import packed_item
from espalier.harness.models.build_adapter import load_adapter
from tests.families import llava, onevision
from tests.tiny import chat, picture

SIDE, PATCHES = 4, 16
SIZES = {
    "fits the plane": (28, 56),
    "square": (28, 28),
    "tall, columns cut": (12, 56),
    "wide, rows cut": (56, 12),
    "tall, odd cut": (20, 56),
    "larger than any plane": (90, 80),
}


@pytest.fixture(scope="module")
def adapters():
    specs = {
        "llava_next": llava.FAMILIES["llava_next"].spec,
        "llava_onevision": onevision.ONEVISION,
    }
    return {name: load_adapter(spec) for name, spec in specs.items()}


def packings(adapter, inputs, features):
    """Run the model's own packing on (units, C) features of all images; newlines are NaN."""
    model = adapter.model.model
    newline = torch.full(features.shape[-1:], torch.nan, dtype=features.dtype)
    tiles = [
        item.work.units // PATCHES for items in adapter.items(inputs).values() for item in items
    ]
    views = features.view(-1, PATCHES, features.shape[-1]).split(tiles)
    options = {"vision_feature_select_strategy": "default"}
    if adapter.spec.adapter == "llava_onevision":
        options = {"vision_aspect_ratio": model.config.vision_aspect_ratio}
    packed, _ = model.pack_image_features(
        list(views), inputs["image_sizes"], image_newline=newline, **options
    )
    return packed


def unit_features(adapter, inputs, width=6):
    units = sum(item.work.units for items in adapter.items(inputs).values() for item in items)
    return torch.randn(
        units, width, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )


def sized(*sizes):
    return [chat("w", picture(n, *size)) for n, size in enumerate(sizes)]


@pytest.fixture
def adapter(adapters, name):
    return adapters[name]


@pytest.mark.parametrize("name", ["llava_next", "llava_onevision"])
def test_tokens_are_the_units_that_the_models_packing_puts_there(adapter):
    """All shapes in one batch, so that unit numbers run on from image to image."""
    inputs = adapter.encode(sized(*SIZES.values()))
    features = unit_features(adapter, inputs)
    items = adapter.items(inputs)[adapter.model.config.image_token_id]
    for item, expected in zip(items, packings(adapter, inputs, features), strict=True):
        assert torch.equal(~item.prunable, expected.isnan().all(1))
        assert (mix(features, item.source, item.share) - expected)[item.prunable].abs().max() < 1e-6
        if item.share is not None:
            assert torch.allclose(
                item.share.sum(1)[item.prunable], torch.ones(1, dtype=torch.float64)
            )


@pytest.mark.parametrize("name", ["llava_next", "llava_onevision"])
def test_placeholders_are_as_many_as_the_processor_writes(adapter):
    for request in sized(*SIZES.values()):
        inputs = adapter.encode([request])
        token = adapter.model.config.image_token_id
        (item,) = adapter.items(inputs)[token]
        assert len(item) == int((inputs["input_ids"] == token).sum())


@pytest.mark.parametrize(
    ("size", "tokens", "places"),
    [
        # (width, height); places: token -> (tile, row, column of the tile's patches), counted by hand.
        # 28 x 56 fits a plane of 1 x 2 crops: 4 rows of 8 tokens and a newline.
        ((56, 28), 16 + 4 * 9, {16: (1, 0, 0), 20: (2, 0, 0), 25: (1, 1, 0), 50: (2, 3, 3)}),
        # 12 pixels of 28 across: one column on either side is padding.
        ((12, 56), 16 + 8 * 3, {16: (1, 0, 1), 17: (1, 0, 2), 28: (2, 0, 1)}),
        ((56, 12), 16 + 2 * 9, {16: (1, 1, 0), 20: (2, 1, 0), 25: (1, 2, 0)}),
    ],
)
@pytest.mark.parametrize("name", ["llava_next", "llava_onevision"])
def test_cut_padding_by_hand(adapter, size, tokens, places):
    (item,) = adapter.items(adapter.encode(sized(size)))[adapter.model.config.image_token_id]
    assert (len(item), item.share) == (tokens, None)
    assert item.source[:16, 0].tolist() == list(range(16))
    for token, (tile, row, column) in places.items():
        assert item.source[token, 0] == tile * PATCHES + row * SIDE + column
        assert item.tile[token] == tile
        assert item.prunable[token]


@pytest.mark.parametrize("name", ["llava_next", "llava_onevision"])
def test_each_view_is_a_rectangle_in_raster_order(adapter):
    layout = adapter.layout(adapter.encode(sized(*SIZES.values())))
    for row, count in enumerate(layout.counts):
        grid = layout.grid[row, :count]
        for view in (0, 1):
            places = grid[grid[:, 1] == view, 2:]
            height, width = (places.max(0).values + 1).tolist()
            raster = torch.cartesian_prod(torch.arange(height), torch.arange(width))
            assert torch.equal(places, raster)
        assert torch.equal(grid[:, 1], grid[:, 1].sort().values)
        assert torch.equal(layout.tile[row, :count] == 0, grid[:, 1] == 0)


def test_large_planes_are_blends_of_four_units(adapters):
    """3 x 3 crops of 4 x 4 patches are shrunk to 5 x 5 tokens: sqrt(144 / 32) = 2.12."""
    adapter = adapters["llava_onevision"]
    inputs = adapter.encode(sized((84, 84), (28, 28)))
    item, plain = adapter.items(inputs)[adapter.model.config.image_token_id]
    assert (plain.share, len(plain)) == (None, 16 + 4 * 5)
    assert (len(item), item.share.shape) == (16 + 5 * 6, (46, 4))
    blended = item.prunable & (item.grid[:, 1] == 1)
    assert ((item.share[blended] > 0).sum(1) == 4).any()
    # Bilinear interpolation of a plane of unit vectors is the table of weights.
    units = torch.arange(9 * PATCHES).view(3, 3, SIDE, SIDE).permute(0, 2, 1, 3).reshape(12, 12)
    plane = torch.eye(144, dtype=torch.float64)[units].permute(2, 0, 1)[None]
    expected = interpolate(plane, (5, 5), mode="bilinear")[0].flatten(1).T
    table = torch.zeros(25, 144, dtype=torch.float64)
    table.scatter_add_(1, item.source[blended] - PATCHES, item.share[blended])
    assert torch.allclose(table, expected, atol=1e-9)
    # The global view is never blended.
    first = item.grid[:, 1] == 0
    assert torch.equal(item.share[first].max(1).values, torch.ones(16, dtype=torch.float64))


@pytest.mark.parametrize("size", [(2304, 2304), (1000, 700), (380, 1500), (5000, 800), (400, 300)])
def test_real_size(size):
    """The published settings: 27 x 27 patches a tile, up to 6 x 6 crops, shrunk to about nine tiles."""
    config = LlavaOnevisionConfig()
    pack = partial(LlavaOnevisionModel.pack_image_features, SimpleNamespace(config=config))
    shape = get_anyres_image_grid_shape(torch.tensor(size), config.image_grid_pinpoints, 384)

    def packed(features):
        newline = torch.full(features.shape[-1:], torch.nan, dtype=features.dtype)
        return pack([features], torch.tensor([size]), newline, "anyres_max_9")[0][0]

    item = packed_item(packed, shape, 27, 100, False)
    tiles = 1 + shape[0] * shape[1]
    assert item.work.units == item.work.tokens == tiles * 729
    assert item.work.pairs == tiles * 729**2
    features = torch.randn(tiles, 729, 2, dtype=torch.float64)
    expected = packed(features)
    tokens = mix(torch.cat([torch.zeros(100, 2), features.flatten(0, 1)]), item.source, item.share)
    assert torch.equal(~item.prunable, expected.isnan().all(1))
    assert (tokens - expected)[item.prunable].abs().max() < 1e-9
    assert (item.share is not None) == (tiles > 1 + 9)
    assert len(item) <= 729 + 81 * 90


def test_a_lone_tile_is_the_global_view_and_one_newline(adapters):
    """Several images in one prompt are not cut into crops."""
    adapter = adapters["llava_onevision"]
    inputs = adapter.encode([chat("w", picture(0, 60, 30), picture(1, 20, 80)), *sized((28, 28))])
    first, second, single = adapter.items(inputs)[adapter.model.config.image_token_id]
    for number, item in enumerate((first, second)):
        assert (len(item), item.prunable.tolist()) == (PATCHES + 1, [True] * PATCHES + [False])
        assert item.source[:PATCHES, 0].tolist() == list(
            range(number * PATCHES, (number + 1) * PATCHES)
        )
        assert not item.tile[:PATCHES].any()
        assert item.work.units == PATCHES
    assert (single.work.units, int(single.source.min())) == (2 * PATCHES, 2 * PATCHES)
