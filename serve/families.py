"""The model families of the plug-in: for each, where an item's tokens are and what its tower is built of.

A family gives two functions, and nothing else: `places` from the configuration and an item's fields, and `tower` from
the model. A new family is a `Family` here and its line in `FAMILIES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from espalier.serve.adapter import tower_parts
from espalier.serve.places import Fields, Places, Tower, item, rectangle


@dataclass(frozen=True)
class Family:
    """One model class of vLLM.

    Attributes:
        module: file of vLLM's `model_executor/models`.
        architecture: class of vLLM there.
        places: from the configuration, the modality, an item's fields and its number of tokens to its places.
        tower: from a model to its tower.
        axes: position axes of the decoder.
        built_in: methods that vLLM itself has for this class, chosen by `video_pruning_method`.
        towers: types of vision configurations that `tower` reads; none: the class has one type.
    """

    module: str
    architecture: str
    places: Callable[[Any, str, Fields, int], Places]
    tower: Callable[[Any], Tower]
    axes: int = 1
    built_in: tuple[str, ...] = ()
    towers: tuple[str, ...] = ()


def side_of(config: Any) -> int:
    """Return the patches along the edge of a square picture."""
    vision = config.vision_config
    return int(vision.image_size) // int(vision.patch_size)


# ---------------------------------------------------------------- LLaVA


def llava_places(config: Any, modality: str, data: Fields, total: int) -> Places:
    """Return the patches of one picture."""
    del modality, data, total
    return item(rectangle(1, side_of(config), side_of(config)))


def llava_tower(model: Any) -> Tower:
    """Return a CLIP or SigLIP tower, which vLLM builds up to the layer that the projector reads."""
    vision = model.config.vision_config
    return Tower(
        **tower_parts(model),
        depth=vision.num_hidden_layers,
        class_tokens=int("clip" in vision.model_type),
        entry=model.multi_modal_projector,
        projector=model.multi_modal_projector,
        square=1,
        to_units=lambda values: values.flatten(0, 1),
    )


# ---------------------------------------------------------------- AnyRes


def anyres_places(
    tile_limit: float, config: Any, modality: str, data: Fields, total: int
) -> Places:
    """Return the global view and the crops of one picture, found by packing coordinates as vLLM packs features.

    Args:
        tile_limit: tiles that a larger plane of crops is reduced to.
        config: of the model.
        modality: image; a video is pooled instead.
        data: fields of the item.
        total: its tokens.
    """
    if modality == "video":
        return pooled_places(config, data, total)
    from transformers.models.llava_next import modeling_llava_next as packing

    side, size = side_of(config), [int(length) for length in torch.as_tensor(data["image_sizes"])]
    rows, columns = packing.get_anyres_image_grid_shape(
        size, config.image_grid_pinpoints, config.vision_config.image_size
    )

    def pack(values: Tensor) -> Tensor:
        """Return the (T, C) tokens of (tiles, patches, C) values; a newline is NaN."""
        crops = values[1:].view(rows, columns, side, side, -1).permute(4, 0, 2, 1, 3)
        plane = packing.unpad_image(crops.reshape(-1, rows * side, columns * side), size)
        lines, width = plane.shape[1:]
        excess = math.sqrt(lines * width / tile_limit) / side
        if excess > 1.1:  # LLaVA-OneVision keeps planes up to that
            shape = [int(lines // excess), int(width // excess)]
            plane = functional.interpolate(plane[None], shape, mode="bilinear")[0]
        plane = functional.pad(plane, (0, 1), value=torch.nan)
        return torch.cat([values[0], plane.flatten(1).T])

    raster = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    corner = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) * side
    corner = torch.cat([torch.zeros(1, 2, dtype=torch.long), corner])
    coordinates = pack((corner[:, None] + raster).double())
    newline = coordinates[:, 0].isnan()
    prunable = ~newline
    head = side**2
    place = torch.arange(len(coordinates))
    before = newline.long().cumsum(0) - newline.long()
    starts = torch.cat([torch.tensor([head]), newline.nonzero()[:, 0] + 1])
    grid = torch.stack(
        [torch.zeros_like(place), (place >= head).long(), before, place - starts[before]], dim=1
    )
    grid[:head, 2:] = raster
    low = coordinates.nan_to_num().floor().long()
    crop = low // side
    tile = torch.where(place >= head, 1 + crop[:, 0] * columns + crop[:, 1], 0)
    tiles = 1 + rows * columns

    def of_units(values: Tensor) -> Tensor:
        wide = values.reshape(-1, head, values[0].numel())[:tiles]
        tokens = pack(wide)[prunable.to(values.device)]
        return tokens.reshape(-1, *values.shape[1:])

    pixels = data.get("pixel_values")
    return item(
        grid[prunable],
        tile=tile[prunable],
        units=head * (tiles if pixels is None else len(pixels)),
        of_units=of_units,
        blended=bool((coordinates.nan_to_num() > low).any()),
        prunable=prunable,
    )


def pooled_places(config: Any, data: Fields, total: int) -> Places:
    """Return the pooled frames of a video, after which one newline token stands."""
    del data
    side = side_of(config)
    pooled = -(-side // 2)
    frames = (total - 1) // pooled**2

    def of_units(values: Tensor) -> Tensor:
        wide = values.reshape(frames, side, side, -1).permute(0, 3, 1, 2)
        means = functional.interpolate(wide, (pooled, pooled), mode="bilinear")
        return means.permute(0, 2, 3, 1).reshape(-1, *values.shape[1:])

    return item(
        rectangle(frames, pooled, pooled),
        units=frames * side**2,
        of_units=of_units,
        blended=True,
        prunable=torch.arange(total) < total - 1,
    )


# ---------------------------------------------------------------- InternVL


def internvl_places(config: Any, modality: str, data: Fields, total: int) -> Places:
    """Return the tiles of a picture, its thumbnail last, or the frames of a video."""
    del data
    vision = config.vision_config
    side = round(vision.image_size[0] // vision.patch_size[0] * config.downsample_ratio)
    tiles = total // side**2
    if modality == "video":
        line = torch.arange(side**2).repeat(tiles)
        return item(rectangle(tiles, side, side), positions=line.unsqueeze(1).expand(-1, 3))
    views = [*range(1, tiles), 0]
    return item(torch.cat([rectangle(1, side, side, view) for view in views]))


def internvl_tower(model: Any) -> Tower:
    """Return InternViT, built up to the layer that the projector reads; a unit is a square of patches."""
    config = model.config
    vision = config.vision_config
    patches, fold = vision.image_size[0] // vision.patch_size[0], round(1 / config.downsample_ratio)
    units = patches // fold

    def to_units(values: Tensor) -> Tensor:
        blocks = values.view(len(values), units, fold, units, fold, *values.shape[2:])
        return blocks.mean((2, 4)).flatten(0, 2)

    return Tower(
        **tower_parts(model),
        depth=vision.num_hidden_layers,
        class_tokens=1,
        entry=model.multi_modal_projector,
        projector=model.multi_modal_projector,
        square=1,
        to_units=to_units,
    )


# ---------------------------------------------------------------- Qwen


def qwen_places(
    timed: bool, framed: bool, config: Any, modality: str, data: Fields, total: int
) -> Places:
    """Return the merged squares of patches of a picture or video.

    Args:
        timed: whether time advances by seconds (Qwen2.5-VL), else by frames.
        framed: whether words stand before each frame (Qwen3-VL), so that positions begin anew there.
        config: of the model.
        modality: image or video.
        data: fields of the item.
        total: its tokens.
    """
    del total
    vision = config.vision_config
    side = vision.spatial_merge_size
    frames, rows, columns = (int(n) for n in torch.as_tensor(data[f"{modality}_grid_thw"]))
    grid = rectangle(frames, rows // side, columns // side)
    positions = grid[:, [0, 2, 3]].clone()
    if framed:
        positions[:, 0] = 0
    elif timed and modality == "video":
        seconds = float(data.get("second_per_grid_ts", 1.0))
        # Single precision, factor by factor, truncated: as the released code rounds time.
        positions[:, 0] = (grid[:, 0] * seconds * vision.tokens_per_second).long()
    if not getattr(vision, "window_size", 0):
        return item(grid, positions=positions)
    edge = vision.window_size // side // vision.patch_size
    across, down = -(-(columns // side) // edge), -(-(rows // side) // edge)
    window = (grid[:, 0] * down + grid[:, 2] // edge) * across + grid[:, 3] // edge
    unit = window.argsort(stable=True).argsort()
    return item(grid, positions=positions, of_units=lambda values: values[unit.to(values.device)])


def qwen_tower(model: Any) -> Tower:
    """Return the tower, with a merger that concatenates a square of patches to a unit."""
    visual, square = model.visual, model.config.vision_config.spatial_merge_size**2
    merger = visual.merger

    def to_units(values: Tensor) -> Tensor:
        patches = values.flatten(0, 1)
        return patches.reshape(-1, square, *patches.shape[1:]).mean(1)

    return Tower(
        **tower_parts(model),
        depth=model.config.vision_config.depth,
        class_tokens=0,
        entry=merger.ln_q if hasattr(merger, "ln_q") else merger.norm,
        projector=merger.forward,
        square=square,
        to_units=to_units,
        flat=hasattr(merger, "norm"),
    )


#: Before an architecture's name: the class of this package; and vLLM's as it is, for runs that leave pruning to vLLM.
PRUNED, PLAIN = "Pruned", "Plain"

#: Types of the towers of LLaVA with a fixed number of patches.
SQUARE_TOWERS = ("clip_vision_model", "siglip_vision_model")

#: By the architecture of a checkpoint's config.json.
FAMILIES = {
    "LlavaForConditionalGeneration": Family(
        "llava",
        "LlavaForConditionalGeneration",
        llava_places,
        llava_tower,
        towers=SQUARE_TOWERS,
    ),
    **{
        name: Family(
            module, name, partial(anyres_places, tile_limit), llava_tower, towers=SQUARE_TOWERS
        )
        for module, name, tile_limit in (
            ("llava_next", "LlavaNextForConditionalGeneration", math.inf),
            # For any checkpoint, whatever its configuration states.
            ("llava_onevision", "LlavaOnevisionForConditionalGeneration", 9),
        )
    },
    "InternVLForConditionalGeneration": Family(
        "interns1", "InternS1ForConditionalGeneration", internvl_places, internvl_tower
    ),
    **{
        name: Family(module, name, partial(qwen_places, timed, framed), qwen_tower, 3, built_in)
        for module, name, timed, framed, built_in in (
            ("qwen2_vl", "Qwen2VLForConditionalGeneration", False, False, ()),
            ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", True, False, ("evs",)),
            ("qwen3_vl", "Qwen3VLForConditionalGeneration", False, True, ("evs", "vidcom2")),
        )
    },
}
