"""Towers of pictures of any size, which are one list of patches, and projectors that join squares of them.

Towers as Qwen's keep the patches of a square together: a projector unit is a square, in raster order or window by
window. What differs is read from the tower's configuration: windows, positions per second, features of earlier layers.

Towers that keep all patches in raster order part those of a square, so units are patches, and a token is the mean of a
square: in features at a `vision` site, and in signals of the tower. Merged tokens are made of projected ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem, rectangle
from espalier.harness.engine.model_parts import coarse
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.architectures.text_positions import released_positions
from espalier.harness.models.random_weights import Built, Value, built_processor, of
from espalier.harness.settings import Count
from espalier.harness.specs.run_spec import ModelSpec

#: Bounds on the area of pictures in pixels, by the key of `model.processor`.
PICTURE_BOUNDS: Mapping[str, tuple[str, Any]] = {
    "min_pixels": ("image_processor.size.shortest_edge", Count),
    "max_pixels": ("image_processor.size.longest_edge", Count),
}
BOUNDS: Mapping[str, tuple[str, Any]] = {
    **PICTURE_BOUNDS,
    "video_min_pixels": ("video_processor.size.shortest_edge", Count),
    "video_max_pixels": ("video_processor.size.longest_edge", Count),
}

#: Also bounds each frame of a video, as in Qwen's package (qwen-vl-utils), which lmms-eval uses. Checkpoints do not
#: state it, and the library's default is off.
CAP: Mapping[str, tuple[str, Any]] = {
    "cap_pixels_per_frame": ("video_processor.cap_pixels_per_frame", bool)
}

#: Sizes of towers that state their width and the decoder's.
TOWER: Mapping[str, Value] = {
    "depth": of("facts.tower.layers"),
    "hidden_size": of("facts.tower.hidden"),
    "intermediate_size": of("facts.tower.intermediate"),
    "num_heads": of("facts.tower.heads"),
    "out_hidden_size": of("facts.text.hidden"),
}


def patch_processor(
    processor_class: Any, image_class: Any, video_class: Any = None, **colours: Any
) -> Built:
    """Return how a processor for the tower's patch size is built.

    `colours` override the classes' mean and standard deviation of pictures and frames.
    """
    names = {"patch_size": "patch_size", "merge_size": "spatial_merge_size"}
    videos = {"temporal_patch_size": "temporal_patch_size"}
    parts = {"image_processor": image_class, "video_processor": video_class}
    sizes = {
        key: of(f"architecture.vision.{name}")
        for key, name in (names if video_class is None else names | videos).items()
    }
    built = {name: Built(part, sizes | colours) for name, part in parts.items() if part is not None}
    return built_processor(processor_class, **built)


def merged_item(
    shape: Sequence[int],
    side: int,
    first: int,
    order: Tensor,
    window_pairs: int,
    class_tokens: int = 0,
) -> VisualItem:
    """Return the item of an image or video.

    Args:
        shape: frames, rows and columns of patches.
        side: patches along the edge of a merged square.
        first: number of the first projector unit.
        order: (units,) raster number of each unit, in the projector's order.
        window_pairs: pairs of patches attended in a windowed layer, 0 without windows.
        class_tokens: tokens of the tower for each frame, besides its patches.
    """
    frames, rows, columns = shape
    tokens = rows * columns + class_tokens
    work = Work(
        tokens=frames * tokens,
        pairs=frames * tokens**2,
        window_pairs=window_pairs,
        units=len(order),
    )
    # Unit k is raster token order[k]; the inverse permutation maps each token to its unit.
    source = first + order.argsort().unsqueeze(1)
    return VisualItem(rectangle(frames, rows // side, columns // side), source, work=work)


def window_order(shape: Sequence[int], merge: int, side: int) -> tuple[Tensor, int]:
    """Return the units window by window, in raster order within each, and the pairs of patches attended in windows.

    Args:
        shape: frames, rows and columns of patches.
        merge: patches along the edge of a unit.
        side: units along the edge of a window; windows at the image's border are smaller.
    """
    frames, rows, columns = shape[0], shape[1] // merge, shape[2] // merge
    frame, _, row, column = rectangle(frames, rows, columns).unbind(1)
    windows_x, windows_y = -(-columns // side), -(-rows // side)
    window = (frame * windows_y + row // side) * windows_x + column // side
    patches = window.bincount() * merge**2
    return window.argsort(stable=True), int(patches.square().sum())


class MergedPatchesAdapter(Adapter):
    """Pictures, then videos, each one item of merged squares."""

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Replace the library's rule for positions of videos with the released one if they differ."""
        super().__init__(model, processor, spec)
        if not self.data.library_positions:
            model.model.get_rope_index = partial(
                released_positions,
                side=self._vision.spatial_merge_size,
                pace=getattr(self._vision, "tokens_per_second", None),
            )

    @classmethod
    def adopt_processor(cls, processor: Any, spec: ModelSpec) -> Any:
        """Return the processor with the picture sizes of `model.processor`."""
        if CAP.items() <= cls.data.settings.items():
            # Without a value, the library warns at every video.
            videos = processor.video_processor
            videos.cap_pixels_per_frame = bool(videos.cap_pixels_per_frame)
        return super().adopt_processor(processor, spec)

    @property
    def _vision(self) -> Any:
        """The tower's configuration."""
        return self.model.config.vision_config

    @property
    def _square(self) -> int:
        """Number of patches that the projector merges into one token."""
        return int(self._vision.spatial_merge_size) ** 2

    def tower_attention(self, index: int | None) -> nn.Module:
        """Return the attention of a block; None: the last; negative numbers count from the end.

        Raises:
            UserError: the block does not exist, or has window attention.
        """
        blocks: Any = self.tower.blocks
        valid = self.global_blocks()
        number = len(blocks) - 1 if index is None else index + len(blocks) * (index < 0)
        if number not in valid:
            raise UserError(
                f"tower layer {number} of model={self.spec.name!r} does not attend over all patches of an image; "
                f"valid: {', '.join(map(str, valid))}"
            )
        return cast("nn.Module", blocks[number].attn)

    def global_blocks(self) -> Sequence[int]:
        """Return the numbers of the blocks with attention over a whole image or frame."""
        blocks = getattr(self._vision, "fullatt_block_indexes", range(self._vision.depth))
        return cast("Sequence[int]", blocks)

    def tower_windows(self) -> int:
        """Return the number of blocks with window attention."""
        return len(self.tower_layers()) - len(self.global_blocks())

    def deepstack(self) -> Mapping[int, nn.Module]:
        """Return the mergers of the tower layers with features that the decoder adds to visual tokens."""
        layers = getattr(self.tower, "deepstack_visual_indexes", ())
        return dict(zip(layers, getattr(self.tower, "deepstack_merger_list", ()), strict=True))

    def to_units(self, values: Tensor) -> Tensor:
        """Average (1, patches, ...) values over the adjacent patches of each unit."""
        return values.reshape(-1, self._square, *values.shape[2:]).mean(1)

    def features(self, projector_input: Tensor) -> Tensor:
        """Concatenate (patches, D) features to (units, square * D), as the projector does after its norm."""
        return projector_input.reshape(-1, self._square * projector_input.shape[-1])

    def project(self, features: Tensor) -> Tensor:
        """Project (units, square * D) features; the norm is applied per patch."""
        return cast(
            "Tensor", self.projector(features.reshape(features.shape[0] * self._square, -1))
        )

    process = Adapter.process_in_order

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per image, then per video, as the tower gets them: units in raster order, frame by frame."""
        config, first = self.model.config, 0
        image = config.image_token_id
        video = image if self.data.one_placeholder else config.video_token_id
        items: dict[int, list[VisualItem]] = {image: [], video: []}
        for token, name in ((image, "image_grid_thw"), (video, "video_grid_thw")):
            for shape in inputs[name].tolist() if name in inputs else []:
                side = self._vision.spatial_merge_size
                item = merged_item(shape, side, first, *self.order(shape), self.data.class_tokens)
                items[token].append(item)
                first += item.work.units
        return items

    def coarse_inputs(self, inputs: Mapping[str, Any], share: float) -> dict[str, Any]:
        """Return inputs with coarse pictures and frames, which the processor has cut into patches (P, 3 T p p)."""
        vision, result = self._vision, dict(inputs)
        sizes = (vision.temporal_patch_size, vision.patch_size, vision.spatial_merge_size)
        for name, grids in (
            ("pixel_values", "image_grid_thw"),
            ("pixel_values_videos", "video_grid_thw"),
        ):
            if name in inputs:
                shapes = inputs[grids].tolist()
                parts = inputs[name].split([math.prod(shape) for shape in shapes])
                pairs = zip(parts, shapes, strict=True)
                result[name] = torch.cat([_coarse_squares(*pair, sizes, share) for pair in pairs])
        return result

    def order(self, shape: Sequence[int]) -> tuple[Tensor, int]:
        """Return the raster numbers of units in the projector's order, and the pairs attended in windows."""
        vision = self._vision
        if not hasattr(vision, "window_size"):
            return torch.arange(math.prod(shape) // self._square), 0
        side = vision.window_size // vision.spatial_merge_size // vision.patch_size
        return window_order(shape, vision.spatial_merge_size, side)


def _coarse_squares(
    patches: Tensor, shape: Sequence[int], sizes: tuple[int, int, int], share: float
) -> Tensor:
    """Return the patches of one picture or video, made coarse.

    Args:
        patches: (P, 3 T p p) in the order of merged squares.
        shape: time steps, rows and columns of patches.
        sizes: frames T of a patch, pixels p along its edge, and patches along the edge of a merged square.
        share: of the pixels.
    """
    (frames, rows, columns), (depth, edge, side) = shape, sizes
    squares = (frames, rows // side, columns // side, side, side, -1, depth, edge, edge)
    cut = patches.view(squares).permute(0, 6, 5, 1, 3, 7, 2, 4, 8)
    pixels = cut.reshape(frames * depth, -1, rows * edge, columns * edge)
    return (
        coarse(pixels, share)
        .view(cut.shape)
        .permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        .reshape(patches.shape)
    )


class RasterPatchesAdapter(Adapter):
    """Pictures of any size as one list of patches; a family states what a square of them becomes."""

    def process(self, texts: list[str], pictures: list[list[Any]], clips: list[list[Any]]) -> Any:
        """Run the processor on all pictures in the order of their placeholders."""
        return self.run_processor(texts, images=list(chain(*pictures)) or None)

    def grids(self, inputs: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Return rows and columns of patches of each picture of a batch."""
        shapes = inputs["image_grid_thw"].tolist() if "image_grid_thw" in inputs else []
        return [(rows, columns) for _, rows, columns in shapes]

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per picture."""
        items: list[VisualItem] = []
        first = 0
        for rows, columns in self.grids(inputs):
            items.append(self.picture_item(rows, columns, first))
            first += rows * columns
        return {self.model.config.image_token_id: items}

    def picture_item(self, rows: int, columns: int, first: int) -> VisualItem:
        """Return the item of a picture of rows x columns patches, the first of them number `first`.

        Default: squares of patches in raster order, each a token.
        """
        side = self.model.config.vision_config.spatial_merge_size
        source, patches = squares(rows, columns, side, first), rows * columns
        share = torch.full(source.shape, side**-2)
        work = Work(tokens=patches, pairs=patches**2, units=len(source))
        return VisualItem(rectangle(1, rows // side, columns // side), source, share, work=work)

    def coarse_inputs(self, inputs: Mapping[str, Any], share: float) -> dict[str, Any]:
        """Return inputs with coarse pictures, which the processor has cut into patches (P, 3, p, p) or (P, 3 p p)."""
        grids = self.grids(inputs)
        if not grids:
            return dict(inputs)
        pixels = inputs["pixel_values"]
        edge = self.model.config.vision_config.patch_size
        parts = pixels.view(-1, 3, edge, edge).split([rows * columns for rows, columns in grids])
        pairs = zip(parts, grids, strict=True)
        patches = torch.cat([_coarse_raster(part, *grid, share) for part, grid in pairs])
        return {**inputs, "pixel_values": patches.view(pixels.shape)}


def squares(rows: int, columns: int, side: int, first: int) -> Tensor:
    """Return (tokens, side^2): the patches of each square in raster order, numbered from `first`."""
    patches = torch.arange(first, first + rows * columns)
    blocks = patches.view(rows // side, side, columns // side, side).transpose(1, 2)
    return blocks.reshape(-1, side**2)


def _coarse_raster(patches: Tensor, rows: int, columns: int, share: float) -> Tensor:
    """Return the patches (rows columns, C, p, p) of one picture, made coarse."""
    cut = patches.unflatten(0, (rows, columns)).permute(2, 0, 3, 1, 4)
    picture = coarse(cut.flatten(3, 4).flatten(1, 2), share)
    return picture.view(cut.shape).permute(1, 3, 0, 2, 4).reshape(patches.shape)
