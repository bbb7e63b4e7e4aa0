"""Tokens are drawn where their pixels come from, compared with the pixels that the processor extracts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from espalier.harness.api.questions import question_chat, video
from espalier.harness.api.visible_tokens import VisibleChat, grid_rows, visible_chat
from espalier.harness.models.adapter import Adapter
from tests.api.families import ramps
from tests.families import FAMILIES
from tests.family_runs import adapter_of

#: Families whose pixels lie in square pictures, or in a list of patches; pictures of two shapes each.
SQUARE = ("llava", "llava_next", "internvl", "deepseek_ocr", "deepseek_ocr_gundam")
SHAPES = ((120, 80), (70, 150))


def seen(adapter: Adapter, *media: Any) -> tuple[VisibleChat, dict[str, Any], torch.Tensor]:
    """Return the visible tokens of a chat, its inputs, and the projector unit of each token."""
    chat = question_chat(list(media), "w1 w2", adapter.spec)
    inputs = adapter.encode([chat])
    layout = adapter.layout(inputs)
    return (
        visible_chat(adapter, chat, grid_rows(adapter, inputs)[0]),
        inputs,
        layout.source[0, :, 0],
    )


def centres(visible: VisibleChat) -> tuple[np.ndarray, np.ndarray]:
    """Return (N, 2) the middle of each token's place, and (N,) whether it lies wholly inside its picture."""
    places, inside = [], []
    for number, row, column in visible.tokens:
        view = visible.grids[number]
        box = view.box.cell(int(row), int(column), view.rows, view.columns)
        places.append(((box.left + box.right) / 2, (box.top + box.bottom) / 2))
        inside.append(min((box.left, box.top, 1 - box.right, 1 - box.bottom)) > -1e-6)
    return np.array(places), np.array(inside)


def colours(adapter: Adapter, inputs: dict[str, Any]) -> np.ndarray:
    """Return (units, 2) mean red and green of the pixels of each projector unit, in [0, 1]."""
    pictures = adapter.pictures(inputs)
    visible = []
    for pixels, count in zip(pictures.pixels, pictures.cells, strict=True):
        side = pictures.side
        cut = (
            pixels[:, :2, : count * side, : count * side]
            .unfold(2, side, side)
            .unfold(3, side, side)
        )
        visible.append(cut.mean((-1, -2)).flatten(2).transpose(1, 2).flatten(0, 1))
    mean, std = (torch.tensor(values[:2]) for values in adapter.colours())
    return (torch.cat(visible) * std + mean).numpy()


@pytest.mark.sampled
@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("name", SQUARE)
def test_a_token_lies_where_its_pixels_come_from(name, size):
    adapter = adapter_of(name)
    visible, inputs, units = seen(adapter, ramps(*size))
    places, inside = centres(visible)
    assert inside.sum() > len(inside) / 3
    expected = colours(adapter, inputs)[units.numpy()]
    # Half a level of colour, and what resampling does at borders.
    assert np.abs(places - expected)[inside].max() < 0.06
    assert np.abs(places - expected)[inside].mean() < 0.02


def test_several_pictures_are_padded_where_the_family_pads_them():
    visible, inputs, _ = seen(adapter_of("onevision_image"), ramps(120, 80), ramps(70, 150))
    places, inside = centres(visible)
    pixels = inputs["pixel_values"][:, 0, :2]
    side = int(len(visible.tokens) / 2) ** 0.5
    cut = pixels.unfold(2, 7, 7).unfold(3, 7, 7).mean((-1, -2)).flatten(2).transpose(1, 2)
    expected = (cut.flatten(0, 1) * 0.5 + 0.5).numpy()
    assert side == 4
    assert 0 < inside.sum() < len(inside)
    assert np.abs(places - expected)[inside].max() < 0.05


@pytest.mark.parametrize("name", ["qwen2_vl", "onevision_image", "llava_next"])
def test_one_picture_is_seen_whole(name):
    visible, *_ = seen(adapter_of(name), ramps(56, 42))
    places, _ = centres(visible)
    assert -0.01 < places.min() < 0.2  # a border cell may reach into the padding
    assert 0.8 < places.max() < 1.01
    for view in range(len(visible.grids)):
        assert np.allclose(places[visible.tokens[:, 0] == view].mean(0), 0.5)


@pytest.mark.parametrize(
    ("name", "frames"),
    [("qwen2_vl_video", 2), ("onevision_video", 4), ("internvl_video", 4), ("llava_video", 4)],
)
def test_frames_of_a_video_stand_beside_pictures_in_the_order_of_the_prompt(name, frames):
    adapter = adapter_of(name)
    clip = video([ramps(56, 56) for _ in range(4)], fps=2)
    visible, *_ = seen(adapter, clip)
    assert len(visible.images) == frames
    assert visible.images[1].name == ("1.0 s" if frames == 2 else "0.5 s")
    mixed, *_ = seen(adapter, clip, ramps(28, 56))
    assert [len(mixed.images), mixed.images[-1].picture.size] == [frames + 1, (28, 56)]
    assert len({int(view) for view in mixed.tokens[:, 0]}) == len(mixed.grids)


@pytest.mark.sampled
@pytest.mark.parametrize("name", FAMILIES)
def test_every_visual_token_of_every_family_has_a_place(name):
    adapter = adapter_of(name)
    for chat in FAMILIES[name].chats:
        inputs = adapter.encode([chat])
        layout = adapter.layout(inputs)
        visible = visible_chat(adapter, chat, grid_rows(adapter, inputs)[0])
        assert len(visible.tokens) == layout.counts[0]
        assert {view.image for view in visible.grids} == set(range(len(visible.images)))
