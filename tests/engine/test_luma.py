"""The pixels under visual tokens: cut out slowly from the tower's input, family by family; and Sobel edges on them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

from espalier.harness.engine.model_parts import PixelGrids
from espalier.harness.errors import UserError
from espalier.methods.base import MethodError, Need, Site, View
from espalier.methods.select.sobel import edge_share
from tests.api.test_seen import SQUARE
from tests.families import FAMILIES
from tests.family_runs import adapter_of, shown
from tests.tiny import chat


def watched(name: str, chats: list) -> list[View]:
    return shown(adapter_of(name), [Site("prefix")], [Need("luma")], chats)


def tower_pictures(name: str, inputs: dict) -> list[np.ndarray]:
    """Return the tower's images (3, S, S) in the order of the projector's units, in colours from 0 to 1."""
    adapter = adapter_of(name)
    images = adapter.processor.image_processor
    pixels = list(inputs["pixel_values"].double())
    if name == "llava_next":  # tiles beyond an image's own fill up the batch
        sizes = [
            len(values) for values in adapter.items(inputs)[adapter.model.config.image_token_id]
        ]
        assert len(sizes) == len(pixels)
        pixels = [tile for image in pixels for tile in image]
    pixels += list(inputs.get("pixel_values_local", []))
    mean, std = (
        np.array(values).reshape(3, 1, 1) for values in (images.image_mean, images.image_std)
    )
    return [picture.numpy() * std + mean for picture in pixels]


def slow_luma(picture: np.ndarray, row: int, column: int, side: int) -> np.ndarray:
    """Return the luma of one cell of an image with its border, pixel by pixel."""
    size = picture.shape[1]
    cell = np.zeros((side + 2, side + 2))
    for y in range(-1, side + 1):
        for x in range(-1, side + 1):
            at = row * side + y, column * side + x
            if 0 <= at[0] < size and 0 <= at[1] < size:
                red, green, blue = (2 * picture[c][at] - 1 for c in range(3))
                cell[y + 1, x + 1] = 0.299 * red + 0.587 * green + 0.114 * blue
    return cell


#: Cells along the edge of an image, and their pixels.
CELLS = {
    "llava": (4, 7),
    "llava_next": (4, 7),
    "internvl": (2, 14),
    "deepseek_ocr": (3, 16),
    "deepseek_ocr_gundam": (3, 16),
}


@pytest.mark.parametrize("name", SQUARE)
def test_global_views_are_cut_where_their_tokens_stand(name: str):
    """Row by row of the batch, regardless of the tower's earlier images."""
    adapter, (cells, side) = adapter_of(name), CELLS[name]
    for sample_chat in FAMILIES[name].chats:
        inputs = adapter.encode([sample_chat])
        pictures = tower_pictures(name, inputs)
        (view,) = watched(name, [sample_chat])
        luma = view.signals["luma"][0]
        assert luma.shape[1:] == (side + 2, side + 2)
        views = whole_views(name, inputs, len(pictures))
        n_views = 0
        for token, (image, kind, row, column) in enumerate(view.grid[0].tolist()):
            if kind == 0:
                wanted = slow_luma(pictures[views[image]], row, column, side)
                assert np.abs(luma[token].numpy() - wanted).max() < 1e-9
                n_views += 1
        assert n_views == len(views) * cells**2


def whole_views(name: str, inputs: dict, n_pictures: int) -> list[int]:
    """Return the number of each image's global view."""
    images = inputs["pixel_values"].shape[0]
    if name == "llava_next":
        return [image * inputs["pixel_values"].shape[1] for image in range(images)]
    if (
        name == "internvl"
    ):  # the last tile of each image; the chats here hold images of equally many tiles
        items = adapter_of(name).items(inputs)[adapter_of(name).model.config.image_token_id]
        return (np.cumsum([len(item) // 4 for item in items]) - 1).tolist()
    return list(range(images))


@pytest.mark.parametrize("name", ["llava_next", "internvl", "deepseek_ocr_gundam"])
def test_crops_are_cut_by_the_projectors_units(name: str):
    """Unit u of the projector is cell u of the tower's images, without fillers."""
    adapter = adapter_of(name)
    sample_chat = FAMILIES[name].chats[1]
    inputs = adapter.encode([sample_chat])
    pictures = tower_pictures(name, inputs)
    if name == "llava_next":
        tiles = inputs["pixel_values"].shape[1]
        cells = CELLS[name][0] ** 2
        units = [item.work.units // cells for item in next(iter(adapter.items(inputs).values()))]
        pictures = [pictures[i * tiles + t] for i, count in enumerate(units) for t in range(count)]
    side = CELLS[name][1]
    cut = [
        slow_luma(picture, row, column, side)
        for picture in pictures
        for row in range(picture.shape[1] // side)
        for column in range(picture.shape[1] // side)
    ]
    (view,) = watched(name, [sample_chat])
    for token, unit in enumerate(adapter.layout(inputs).source[0, :, 0].tolist()):
        assert np.abs(view.signals["luma"][0, token].numpy() - cut[unit]).max() < 1e-9
    assert (view.grid[0, :, 1] > 0).any()


@pytest.mark.parametrize("name", SQUARE)
def test_a_batch_gives_the_pixels_of_single_rows(name: str):
    chats = list(FAMILIES[name].chats)
    alone = [watched(name, [chat])[0] for chat in chats]
    together = watched(name, chats)
    lumas = [view.signals["luma"][row] for view in together for row in range(len(view.tokens))]
    for view in alone:
        assert any(
            torch.equal(view.signals["luma"][0], luma)
            for luma in lumas
            if luma.shape == view.signals["luma"][0].shape
        )


def test_pictures_that_cells_do_not_fill_lose_their_edge():
    """A tower with patches of 3 pixels sees 6 of 8; the cell's border still shows the seventh."""
    pixels = torch.arange(64.0).view(1, 1, 8, 8).expand(1, 3, 8, 8)
    luma = PixelGrids([pixels], [2], 3, (0.5,) * 3, (0.5,) * 3).luma()
    assert luma.shape == (4, 5, 5)
    assert torch.allclose(luma[3], pixels[0, 0, 2:7, 2:7])
    assert (luma[0, 0] == 0).all()
    assert (luma[0, :, 0] == 0).all()


# ---------------------------------------------------------------- edges


def slow_edges(luma: np.ndarray, tau: float, bordered: bool) -> float:
    """Return the share of steep pixels of one patch with border."""
    k = np.array([[1, 0, -1], [2, 0, -2], [1, 0, -1]])
    side = luma.shape[0] - 2
    if not bordered:
        luma = np.pad(luma[1:-1, 1:-1], 1)
    steep = 0
    for y in range(side):
        for x in range(side):
            window = luma[y : y + 3, x : x + 3]
            along_x, along_y = float((k * window).sum()), float((k.T * window).sum())
            steep += math.sqrt(along_x**2 + along_y**2) > tau
    return steep / side**2


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("tau", [0.0, 0.2, 1.5])
def test_edges_equal_the_slow_ones(tau: float, whole: bool):
    luma = torch.rand(2, 3, 9, 9, generator=torch.Generator().manual_seed(0)) * 0.8
    luma[0, 0] = 0.3
    share = edge_share(luma, tau, whole)
    for row in range(2):
        for token in range(3):
            assert share[row, token] == pytest.approx(
                slow_edges(luma[row, token].double().numpy(), tau, whole)
            )


def test_blank_patches():
    """White paper meets grey zeros at the patch's border; grey letterbox and full images have no edge inside."""
    white, grey = torch.ones(66, 66), torch.full((66, 66), 127 / 255 * 2 - 1)
    patches = torch.stack([white, grey, -white]).unsqueeze(0)
    assert edge_share(patches, 0.2, across_patches=False)[0].tolist() == [252 / 4096, 0, 252 / 4096]
    assert edge_share(patches, 0.2, across_patches=True)[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_pixel_that_is_not_finite_is_an_error(poison: float):
    luma = torch.zeros(1, 2, 5, 5)
    luma[0, 1, 2, 2] = poison
    with pytest.raises(MethodError, match="luma: NaN or infinite among 50 values"):
        edge_share(luma, 0.2, across_patches=False)


@pytest.mark.parametrize(("colour", "share"), [((255,) * 3, 60 / 256), ((127,) * 3, 0.0)])
def test_blank_pages_through_the_model(colour: tuple[int, int, int], share: float):
    (view,) = watched("deepseek_ocr", [chat("w1", Image.new("RGB", (48, 48), colour))])
    density = edge_share(view.signals["luma"], 0.2, across_patches=False)
    assert torch.allclose(density, torch.full((1, 9), share))


def test_letterbox_has_no_edges():
    """A wide white page in a mode that pads: cells of pure padding are flat, cells of paper have their borders."""
    (view,) = watched("deepseek_ocr_gundam", [chat("w1", Image.new("RGB", (30, 10), (255,) * 3))])
    density = edge_share(view.signals["luma"], 0.2, across_patches=False)[0].view(3, 3)
    # 48 x 16 pixels of paper: the middle row of cells.
    assert torch.allclose(density[1], torch.full((3,), 60 / 256))
    assert not density[[0, 2]].any()


# ---------------------------------------------------------------- models without


def test_a_family_without_pictures_says_so():
    with pytest.raises(UserError, match=r"signal 'luma' .*model='tiny' has none"):
        watched("qwen2_5_vl", [FAMILIES["qwen2_5_vl"].chats[0]])
