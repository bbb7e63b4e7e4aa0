"""Where the tokens of an item are: grids, projector units and positions, against loops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from espalier.serve.families import (
    FAMILIES,
    internvl_tower,
    llava_tower,
    qwen_tower,
    side_of,
)
from espalier.serve.places import Places, Tower, among_words, item, rectangle
from tests.serve.stubs import llava_config, put_module


def places_of(name: str, config: Any, modality: str, data: dict[str, Any], total: int) -> Places:
    return FAMILIES[name].places(config, modality, data, total)


def slow_among_words(places: Places, embedded: list[bool]) -> tuple[list[list[int]], int]:
    """Positions token by token: a run of words or of visual tokens starts after the largest position before it."""
    positions: list[list[int]] = []
    token = start = 0
    for index, visual in enumerate(embedded):
        if index and visual != embedded[index - 1]:
            start = max(max(row) for row in positions) + 1
            run = index
        elif not index:
            run = 0
        local = places.positions[token].tolist() if visual else [index - run] * 3
        token += visual
        positions.append([start + value for value in local])
    return positions, max(max(row) for row in positions) + 1


@pytest.mark.parametrize("shape", [(2, 3, 2), (2, 1, 4), (3, 2, 2)])
@pytest.mark.parametrize("words", [1, 3])
def test_positions_between_words_are_those_of_a_loop(
    shape: tuple[int, int, int], words: int
) -> None:
    """The largest position of a frame is below its number of tokens."""
    frames, rows, columns = shape
    grid = rectangle(*shape)
    places = item(grid, positions=grid[:, [0, 2, 3]] * torch.tensor([0, 1, 1]))
    embedded: list[bool] = []
    for _ in range(frames):
        embedded += [False] * words + [True] * rows * columns
    embedded += [False] * 2
    positions, span = among_words(places, torch.tensor(embedded))
    assert (positions.tolist(), span) == slow_among_words(places, embedded)


def test_an_item_has_a_unit_and_a_position_for_each_token() -> None:
    places = item(rectangle(2, 3, 4, view=1))
    assert rectangle(2, 3, 4, view=1)[13].tolist() == [1, 1, 0, 1]
    assert (places.units, places.span, len(places.prunable)) == (24, 24, 24)
    assert (places.positions.T.tolist(), places.tile.tolist()) == ([list(range(24))] * 3, [1] * 24)
    values = torch.randn(24, 2)
    assert places.of_units(values) is values


def test_a_tower_counts_layers_and_units() -> None:
    width, text = 3, 5
    linear = nn.Linear(4 * width, text)
    for flat in (False, True):

        def projector(patches: Tensor, flat: bool = flat) -> Tensor:
            assert patches.shape == ((8, 3) if flat else (8, 1, 3))
            return linear(patches.reshape(2, -1))

        tower = Tower(
            layers=[nn.Identity()] * 5,
            compiled=(),
            depth=6,
            class_tokens=0,
            entry=linear,
            projector=projector,  # type: ignore[arg-type]
            square=4,
            to_units=lambda values: values,
            flat=flat,
        )
        assert [tower.number(layer) for layer in (None, 0, 5, -1, -6)] == [4, 0, 5, 5, 0]
        entering = torch.randn(8, 1, width)
        features = tower.features(entering)
        assert features.shape == (2, 12)
        assert torch.equal(tower.project(features), linear(entering.reshape(2, -1)))


# ---------------------------------------------------------------- families


def test_a_square_picture_has_a_token_for_each_patch() -> None:
    config = llava_config()
    assert side_of(config) == 4
    places = places_of("LlavaForConditionalGeneration", config, "image", {}, 16)
    assert torch.equal(places.grid, rectangle(1, 4, 4))


def test_crops_of_a_picture_have_their_places_and_units() -> None:
    """The global view, then the plane of the crops with a newline after each row."""
    name = "LlavaNextForConditionalGeneration"
    config = llava_config(image_grid_pinpoints=[[8, 16], [16, 8]])
    places = places_of(name, config, "image", {"image_sizes": torch.tensor([8, 16])}, 16 + 36)
    assert places.units == 48
    assert not places.blended
    assert (~places.prunable).nonzero()[:, 0].tolist() == [16 + 9 * row + 8 for row in range(4)]
    expected = [[0, 0, row, column] for row in range(4) for column in range(4)]
    expected += [[0, 1, row, column] for row in range(4) for column in range(8)]
    assert places.grid.tolist() == expected
    assert places.tile.tolist() == [0] * 16 + [1, 1, 1, 1, 2, 2, 2, 2] * 4
    units = places.of_units(torch.arange(48.0)).tolist()
    assert (units[:16], units[16:24]) == (list(range(16)), [16, 17, 18, 19, 32, 33, 34, 35])
    pixels = torch.zeros(5, 3, 8, 8)  # crops that pad a batch have units, and no tokens
    data = {"image_sizes": torch.tensor([8, 16]), "pixel_values": pixels}
    padded = places_of(name, config, "image", data, 52)
    assert (padded.units, padded.of_units(torch.arange(80.0)).tolist()) == (80, units)


def test_a_large_plane_is_reduced_to_nine_tiles() -> None:
    """4 x 4 crops of 4 x 4 patches, and sides of 16 / (16^2 / 9 / 4^2)^0.5 = 12 tokens in place of 16."""
    config = llava_config(image_grid_pinpoints=[[32, 32]])
    data = {"image_sizes": torch.tensor([32, 32])}
    for name, side in (("LlavaNext", 16), ("LlavaOnevision", 12)):
        places = places_of(f"{name}ForConditionalGeneration", config, "image", data, 0)
        assert len(places.prunable) == 16 + side * (side + 1)
        assert (~places.prunable).sum() == side
        assert places.blended is (side == 12)
        assert len(places.of_units(torch.randn(17 * 16, 2))) == 16 + side**2


def test_a_padded_picture_loses_its_margins() -> None:
    """8 x 16 crops of a picture of 4 x 16: half of the rows are padding."""
    config = llava_config(image_grid_pinpoints=[[8, 16]])
    data = {"image_sizes": torch.tensor([4, 16])}
    places = places_of("LlavaNextForConditionalGeneration", config, "image", data, 0)
    assert len(places.prunable) == 16 + 2 * 9
    assert places.of_units(torch.arange(48.0))[16:20].tolist() == [20, 21, 22, 23]


def test_frames_are_pooled_and_end_in_a_newline() -> None:
    name = "LlavaOnevisionForConditionalGeneration"
    places = places_of(name, llava_config(), "video", {}, 3 * 4 + 1)
    assert torch.equal(places.grid, rectangle(3, 2, 2))
    assert places.prunable.tolist() == [True] * 12 + [False]
    assert (places.units, places.blended, places.span) == (48, True, 13)
    assert places.of_units(torch.arange(48.0)).tolist()[:4] == [2.5, 4.5, 10.5, 12.5]


def test_tiles_of_internvl_end_in_the_thumbnail() -> None:
    vision = SimpleNamespace(image_size=[8, 8], patch_size=[2, 2])
    config = SimpleNamespace(vision_config=vision, downsample_ratio=0.5)
    name = "InternVLForConditionalGeneration"
    assert places_of(name, config, "image", {}, 12).tile.tolist() == [1] * 4 + [2] * 4 + [0] * 4
    assert places_of(name, config, "image", {}, 4).tile.tolist() == [0] * 4
    video = places_of(name, config, "video", {}, 8)
    assert video.grid[:, 0].tolist() == [0] * 4 + [1] * 4
    # Words stand between frames, so each counts from its own start.
    assert video.positions[:, 0].tolist() == [0, 1, 2, 3] * 2


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("Qwen2VLForConditionalGeneration", [0, 1]),
        ("Qwen2_5_VLForConditionalGeneration", [0, 3]),
        ("Qwen3VLForConditionalGeneration", [0, 0]),
    ],
)
def test_positions_of_qwen_are_time_row_and_column(name: str, times: list[int]) -> None:
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2, window_size=0)
    config = SimpleNamespace(vision_config=vision)
    data = {"video_grid_thw": torch.tensor([2, 4, 6]), "second_per_grid_ts": torch.tensor(1.9)}
    places = places_of(name, config, "video", data, 12)
    expected = [[time, row, column] for time in times for row in range(2) for column in range(3)]
    assert places.positions.tolist() == expected
    assert torch.equal(places.grid, rectangle(2, 2, 3))
    picture = places_of(name, config, "image", {"image_grid_thw": torch.tensor([1, 4, 6])}, 6)
    assert picture.positions[:, 0].tolist() == [0] * 6


def test_windows_of_qwen_reorder_units() -> None:
    """Units arrive window by window, 2 x 2 merged squares each; a window at an edge is smaller."""
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2, window_size=8, patch_size=2)
    config = SimpleNamespace(vision_config=vision)
    data = {"image_grid_thw": torch.tensor([1, 6, 10])}
    places = places_of("Qwen2_5_VLForConditionalGeneration", config, "image", data, 15)
    order = [
        (row, column)
        for down in range(2)
        for across in range(3)
        for row in range(2 * down, min(2 * down + 2, 3))
        for column in range(2 * across, min(2 * across + 2, 5))
    ]
    arriving = torch.tensor([row * 5 + column for row, column in order])
    assert places.of_units(arriving).tolist() == list(range(15))


class Attention(nn.Module):
    """vLLM's `MMEncoderAttention`."""


class Compiled(Attention):
    do_not_compile = False


def test_towers_of_the_families_are_read_to_the_projector(monkeypatch: pytest.MonkeyPatch) -> None:
    put_module(monkeypatch, "vllm.model_executor.layers.attention", MMEncoderAttention=Attention)
    layers, projector = [Attention(), Compiled(), Attention()], nn.Linear(2, 2)
    modules = [nn.Identity(), *layers, projector]

    def model(config: Any, **parts: Any) -> SimpleNamespace:
        return SimpleNamespace(config=config, modules=lambda: iter(modules), **parts)

    tower = llava_tower(model(llava_config(), multi_modal_projector=projector))
    assert (tower.layers, tower.compiled) == (layers, layers[1:2])
    assert (tower.number(None), tower.depth, tower.class_tokens) == (2, 4, 1)
    assert torch.equal(tower.to_units(torch.arange(6).view(2, 3)), torch.arange(6))
    vision = SimpleNamespace(image_size=[8, 8], patch_size=[2, 2], num_hidden_layers=3)
    config = SimpleNamespace(vision_config=vision, downsample_ratio=0.5)
    intern = internvl_tower(model(config, multi_modal_projector=projector))
    assert (intern.number(None), intern.class_tokens) == (2, 1)
    assert intern.to_units(torch.arange(16.0).view(1, 16)).tolist() == [2.5, 4.5, 10.5, 12.5]
    for norm in ("ln_q", "norm"):
        merger = SimpleNamespace(**{norm: projector}, forward=projector.forward)
        config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, depth=3))
        qwen = qwen_tower(model(config, visual=SimpleNamespace(merger=merger)))
        assert (qwen.entry is projector, qwen.square, qwen.flat) == (True, 4, norm == "norm")
        assert qwen.to_units(torch.arange(8.0).view(1, 8)).tolist() == [1.5, 5.5]
