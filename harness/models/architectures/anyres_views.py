"""LLaVA's AnyRes pictures, packed to one plane of crops, and LLaVA-OneVision's use of them and of pooled frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlavaOnevisionVideoProcessor
from transformers.models.llava_onevision.modeling_llava_onevision import get_anyres_image_grid_shape

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem, rectangle
from espalier.harness.errors import UserError
from espalier.harness.models.architectures.square_views import ClipTowerAdapter
from espalier.harness.models.random_weights import HALF
from espalier.harness.models.view_placement import WHOLE, PictureView, ViewBox, padded_box
from espalier.harness.specs.run_spec import ModelSpec

#: From (tiles, patches, C) features of one image to its (placeholders, C) tokens, newlines as NaN.
Pack = Callable[[Tensor], Tensor]


def packed_features(
    model: Any, options: Mapping[str, Any], size: Tensor, features: Tensor
) -> Tensor:
    """Return a model's packing of one image of `size` (height, width), with `options` of its method."""
    newline = torch.full(features.shape[-1:], torch.nan)
    packed, _ = model.pack_image_features(
        [features], size.unsqueeze(0), image_newline=newline, **options
    )
    return cast("Tensor", packed[0])


def packed_item(
    pack: Pack,
    shape: tuple[int, int],
    side: int,
    first: int,
    class_token: bool,
    view: int | None = None,
) -> VisualItem:
    """Return the item of one image: its global view, then its crops as one plane with a newline after each row.

    If the packing pools tiles or shrinks a large plane, each token blends four patches. Interpolation is linear, so the
    packed coordinates give the four patches and their weights.

    Args:
        pack: packing of the model.
        shape: rows and columns of crops, (0, 0) for an image of one tile.
        side: patches along the edge of a tile.
        first: number of the image's first projector unit; units of the global view come first.
        class_token: whether the tower adds a token to each tile.
        view: tokens along the edge of the global view, if the packing pools tiles; None: `side`.
    """
    patches, tiles = side**2, 1 + shape[0] * shape[1]
    raster, global_grid = (
        torch.cartesian_prod(torch.arange(edge), torch.arange(edge))
        for edge in (side, view or side)
    )
    corner = torch.cartesian_prod(torch.arange(shape[0]), torch.arange(shape[1])) * side
    corner = torch.cat([torch.zeros(1, 2, dtype=torch.long), corner])
    packed = pack((corner[:, None] + raster).double())
    newline = packed[:, 0].isnan()
    prunable = ~newline
    cropped = torch.arange(len(packed)) >= len(global_grid)
    low = packed.nan_to_num().floor().long()
    part = packed.nan_to_num() - low

    def unit(place: Tensor) -> Tensor:
        tile = _tile(place, shape[1], side, cropped)
        offset = place % side
        return first + tile * patches + offset[:, 0] * side + offset[:, 1]

    corners = [low + torch.tensor(step) for step in ((0, 0), (0, 1), (1, 0), (1, 1))]
    weights = [
        (1 - part).prod(1),
        (1 - part[:, 0]) * part[:, 1],
        part[:, 0] * (1 - part[:, 1]),
        part.prod(1),
    ]
    source, share = unit(low).unsqueeze(1), None
    if bool((part > 0).any()):
        share = torch.stack(weights, dim=1)
        # Corners with weight 0 may lie outside the plane.
        source = torch.where(share > 0, torch.stack([unit(c) for c in corners], 1), source)
    n_tokens = patches + int(class_token)
    return VisualItem(
        grid=_grid(newline, cropped, global_grid),
        source=source,
        share=share,
        prunable=prunable,
        tile=_tile(low, shape[1], side, cropped),
        work=Work(tokens=tiles * n_tokens, pairs=tiles * n_tokens**2, units=tiles * patches),
    )


def _tile(place: Tensor, columns: int, side: int, cropped: Tensor) -> Tensor:
    """Return the tile of each position: 0 for the global view, then the crops in raster order."""
    crop = place // side
    return torch.where(cropped, 1 + crop[:, 0] * columns + crop[:, 1], 0)


def _grid(newline: Tensor, cropped: Tensor, raster: Tensor) -> Tensor:
    """Return (n, 4) coordinates: view 0 in raster order, view 1 row by row between its newlines."""
    before = newline.long().cumsum(0) - newline.long()
    place = torch.arange(len(newline))
    starts = torch.cat([torch.tensor([len(raster)]), newline.nonzero()[:, 0] + 1])
    column = place - starts[before]
    grid = torch.stack([torch.zeros_like(place), cropped.long(), before, column], dim=1)
    grid[: len(raster), 2:] = raster
    return grid


#: Maximum number of units that a token blends: both published rules use two rows and two columns.
TAPS = 4


@dataclass(frozen=True, eq=False)
class Pooling:
    """The pooling of a video frame: the projector units that each token blends.

    Attributes:
        units: projector units of a frame.
        side: rows, and columns, of its tokens.
        source: (side * side, S) units of the frame that each token blends.
        share: (side * side, S) their weights.
    """

    units: int
    side: int
    source: Tensor
    share: Tensor

    @classmethod
    def measure(cls, pool: Callable[[Tensor], Tensor], units: int) -> Pooling:
        """Return the rule of a function from (frames, units, C) to (frames, tokens, C).

        Pooling is linear, so applied to unit vectors it returns its weights. Cost: one frame with C = `units`.
        """
        weights = pool(torch.eye(units, dtype=torch.float64)[None])[0]
        share, source = weights.topk(min(TAPS, units), dim=1)
        return cls(units=units, side=isqrt(len(weights)), source=source, share=share)

    def item(
        self, frames: int, first: int, row_newlines: bool, class_token: bool = False
    ) -> VisualItem:
        """Return the item of a video: frames in order, each in raster order.

        Args:
            frames: number of frames.
            first: number of the video's first projector unit; units are ordered by frame.
            row_newlines: a newline token after each row of each frame instead of a single one after the video.
            class_token: whether the tower adds a class token to each frame.
        """
        if row_newlines:
            grid = rectangle(frames, self.side, self.side + 1)
            prunable = grid[:, 3] < self.side
        else:
            end = torch.tensor([[frames - 1, 0, self.side, 0]])
            grid = torch.cat([rectangle(frames, self.side, self.side), end])
            prunable = grid[:, 2] < self.side
        source = torch.full((len(grid), self.source.shape[1]), first)
        share = torch.zeros(source.shape, dtype=self.share.dtype)
        offset = first + self.units * torch.arange(frames).view(-1, 1, 1)
        source[prunable] = (self.source + offset).flatten(0, 1)
        share[prunable] = self.share.repeat(frames, 1)
        n_tokens = self.units + int(class_token)
        work = Work(tokens=frames * n_tokens, pairs=frames * n_tokens**2, units=frames * self.units)
        return VisualItem(grid=grid, source=source, share=share, prunable=prunable, work=work)


class OnevisionViewsAdapter(ClipTowerAdapter):
    """AnyRes for one image, a tile for each of several, pooled video frames.

    Newline tokens (after each row of crops, after each tile of several images, after a video) are always kept.
    """

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Measure how the model pools video frames."""
        super().__init__(model, processor, spec)
        self._side = self.patches()
        self._pooling = Pooling.measure(self._pool, self._side**2)
        #: Tokens along the edge of a view.
        self._view = self._side
        #: Whether the patches of its view stand for each of several images.
        self._bare_views = False

    @classmethod
    def new_processor(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return a processor with SigLIP's preprocessing and AnyRes for images."""
        return cls.built_processor(cls.configuration(spec, tokenizer), tokenizer)

    @classmethod
    def built_processor(cls, config: Any, tokenizer: Any) -> Any:
        """Return the processor of a configuration of the family."""
        side = config.vision_config.image_size
        size = {"height": side, "width": side}
        pixels: dict[str, Any] = {"size": size, "image_mean": HALF, "image_std": HALF}
        return cls.data.processor_class(
            image_processor=cls.data.part_classes["image_processor"](
                **pixels, image_grid_pinpoints=config.image_grid_pinpoints
            ),
            video_processor=LlavaOnevisionVideoProcessor(**pixels),
            tokenizer=tokenizer,
            num_image_tokens=(side // config.vision_config.patch_size) ** 2,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
            vision_aspect_ratio=config.vision_aspect_ratio,
        )

    def pooling_attention(self) -> nn.MultiheadAttention:
        """Return the attention of SigLIP's pooling head, which published checkpoints lack."""
        head = getattr(self.tower, "head", None)
        if head is None:
            return super().pooling_attention()
        return cast("nn.MultiheadAttention", head.attention)

    def process(self, texts: list[str], pictures: list[list[Any]], clips: list[list[Any]]) -> Any:
        """Run the processor on all frames of the clips.

        Raises:
            UserError: videos of different lengths, which the model cannot stack.
        """
        frames = [clip.pixels for row in clips for clip in row]
        counts = sorted({len(video) for video in frames})
        if len(counts) > 1:
            raise UserError(
                f"model.video.frames: one batch holds videos of {counts[0]} and {counts[-1]} frames, which this model "
                "cannot stack; valid: engine.batch_size=1, model.video.short=error"
            )
        images = pictures if any(pictures) else None
        return self.run_processor(
            texts, images=images, videos=frames or None, do_sample_frames=False
        )

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return the items of images, then of videos, in the projector's order."""
        config, first = self.model.config, 0
        class_token = hasattr(self.tower.embeddings, "class_embedding")  # SigLIP has none
        ratio = {"vision_aspect_ratio": config.vision_aspect_ratio}
        images: list[VisualItem] = []
        if "pixel_values" in inputs:
            counts = inputs["batch_num_images"].tolist()
            lone = [count == 1 for count in counts for _ in range(count)]
            for size, single in zip(inputs["image_sizes"].cpu(), lone, strict=True):
                shape = (0, 0)
                if single:
                    shape = get_anyres_image_grid_shape(
                        size, config.image_grid_pinpoints, config.vision_config.image_size
                    )
                view = self._side if self._bare_views and not single else self._view
                images.append(
                    packed_item(
                        partial(packed_features, self.model.model, ratio, size),
                        shape,
                        self._side,
                        first,
                        class_token,
                        view,
                    )
                )
                first += images[-1].work.units
        videos: list[VisualItem] = []
        if "pixel_values_videos" in inputs:
            number, frames = inputs["pixel_values_videos"].shape[:2]
            for _ in range(number):
                videos.append(
                    self._pooling.item(frames, first, self.data.row_newlines, class_token)
                )
                first += videos[-1].work.units
        return {config.image_token_id: images, config.video_token_id: videos}

    def view_box(self, view: PictureView) -> ViewBox:
        """Return the whole picture for the global view of a single one; crops, and each of several, are padded."""
        return WHOLE if view.only_picture and not view.index else padded_box(view)

    def _pool(self, features: Tensor) -> Tensor:
        """Return the model's pooling of frames (F, units, C)."""
        return cast("Tensor", self.model.model.apply_pooling(features))
