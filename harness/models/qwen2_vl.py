"""Qwen2-VL: images of any size, videos, and a projector inside the tower that merges 2 x 2 patches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessor,
)

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem, rectangle
from espalier.harness.engine.pixels import coarse
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.conversations import BARE
from espalier.harness.models.loader import load_part
from espalier.harness.models.qwen_positions import released_positions
from espalier.harness.models.qwen_processor import (
    BOUNDS,
    CAP,
    new_processor,
    process_in_order,
    set_bounds,
)
from espalier.harness.models.random_weights import text_config

if TYPE_CHECKING:
    from espalier.harness.cost.facts import ModelFacts
    from espalier.harness.specs.run_spec import ModelSpec


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


class Qwen2VLAdapter(Adapter):
    """`Qwen2VLForConditionalGeneration`: a projector unit is a square of patches, in raster order."""

    model_class: ClassVar[Any] = Qwen2VLForConditionalGeneration
    config_class: ClassVar[Any] = Qwen2VLConfig
    processor_class: ClassVar[Any] = Qwen2VLProcessor
    takes_video = True
    conversation: ClassVar[str] = "qwen_1_5"
    media = BARE
    joins: ClassVar[Mapping[str, str]] = {}
    placeholders = ("<|image_pad|>", "<|video_pad|>")
    inline = None
    lacking = ("luma",)  # the tower gets a list of patches, from pictures of any size
    settings = (*BOUNDS, CAP)

    #: Keys of the configuration with the number of a special token, and that token.
    marks: ClassVar[Mapping[str, str]] = {
        **{"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
        **{"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"},
    }

    #: Tokens of the tower for each picture or frame, besides its patches.
    class_tokens: ClassVar[int] = 0

    #: Whether the library's position ids equal those of the released model, also for videos.
    library_positions: ClassVar[bool] = False

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Replace the library's rule for positions of videos with the released one if they differ."""
        super().__init__(model, processor, spec)
        if self.library_positions:
            return
        side = model.config.vision_config.spatial_merge_size
        model.model.get_rope_index = partial(released_positions, side=side, pace=self.pace)

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Return the checkpoint's processor with the picture sizes of `model.processor`."""
        return set_bounds(load_part(spec, AutoProcessor), spec)

    @classmethod
    def adopt_processor(cls, processor: Any, spec: ModelSpec) -> Any:
        """Return the caller's processor with the picture sizes of `model.processor`."""
        return set_bounds(processor, spec)

    @classmethod
    def configuration(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return the configuration of tower and text stack, updated by `architecture.model`."""
        return cls.config_class(
            vision_config={**cls.tower_config(spec.facts), **spec.architecture["vision"]},
            text_config=text_config(spec, tokenizer),
            **{key: tokenizer.convert_tokens_to_ids(mark) for key, mark in cls.marks.items()},
            **spec.architecture.get("model", {}),
        )

    @classmethod
    def tower_config(cls, facts: ModelFacts) -> dict[str, Any]:
        """Return the tower's sizes under transformers' keys."""
        tower = facts.tower
        return {
            "depth": tower.layers,
            "embed_dim": tower.hidden,
            "num_heads": tower.heads,
            "mlp_ratio": tower.intermediate // tower.hidden,
            "hidden_size": facts.text.hidden,
        }

    @classmethod
    def new_processor(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return the family's processor for the tower's patches."""
        return new_processor(cls.processor_class, spec, tokenizer)

    # ------------------------------------------------------------------ parts

    @property
    def pace(self) -> float | None:
        """Position steps per second of a video; None: one step per pair of frames."""
        return None

    @property
    def tower(self) -> nn.Module:
        """The vision tower; its last module is the projector."""
        tower: nn.Module = self.model.model.visual
        return tower

    @property
    def projector(self) -> nn.Module:
        """The merger of patches: norm, concatenation of a square of patches, MLP."""
        projector: nn.Module = self.model.model.visual.merger
        return projector

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
        attention: nn.Module = blocks[number].attn
        return attention

    def global_blocks(self) -> Sequence[int]:
        """Return the numbers of the blocks with attention over a whole image or frame; default: all."""
        return range(self.model.config.vision_config.depth)

    def to_units(self, values: Tensor) -> Tensor:
        """Average (1, patches, ...) values over the adjacent patches of each unit."""
        return values.reshape(-1, self._square, *values.shape[2:]).mean(1)

    def features(self, projector_input: Tensor) -> Tensor:
        """Concatenate (patches, D) features to (units, square * D), as the projector does after its norm."""
        return projector_input.reshape(-1, self._square * projector_input.shape[-1])

    def project(self, features: Tensor) -> Tensor:
        """Project (units, square * D) features; the norm is applied per patch."""
        projected: Tensor = self.projector(features.reshape(features.shape[0] * self._square, -1))
        return projected

    @property
    def _square(self) -> int:
        """Number of patches that the projector merges into one token."""
        return int(self.model.config.vision_config.spatial_merge_size) ** 2

    # ------------------------------------------------------------------ inputs

    def process(self, texts: list[str], pictures: list[list[Any]], clips: list[list[Any]]) -> Any:
        """Run the processor on pictures and clips in the order of their placeholders."""
        return process_in_order(self, texts, pictures, clips)

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per image, then per video, as the tower gets them: units in raster order, frame by frame."""
        config, first = self.model.config, 0
        names = {config.image_token_id: "image_grid_thw", config.video_token_id: "video_grid_thw"}
        items: dict[int, list[VisualItem]] = {token: [] for token in names}
        for token, name in names.items():
            for shape in inputs[name].tolist() if name in inputs else []:
                side = config.vision_config.spatial_merge_size
                item = merged_item(shape, side, first, *self.order(shape), self.class_tokens)
                items[token].append(item)
                first += item.work.units
        return items

    def coarse_inputs(self, inputs: Mapping[str, Any], share: float) -> dict[str, Any]:
        """Return inputs with coarse pictures and frames, which the processor has cut into patches (P, 3 T p p)."""
        vision, result = self.model.config.vision_config, dict(inputs)
        sizes = (vision.temporal_patch_size, vision.patch_size, vision.spatial_merge_size)
        for name, grids in (
            ("pixel_values", "image_grid_thw"),
            ("pixel_values_videos", "video_grid_thw"),
        ):
            if name in inputs:
                shapes = inputs[grids].tolist()
                parts = inputs[name].split([math.prod(shape) for shape in shapes])
                pairs = zip(parts, shapes, strict=True)
                result[name] = torch.cat([_coarse(*pair, sizes, share) for pair in pairs])
        return result

    def order(self, shape: Sequence[int]) -> tuple[Tensor, int]:
        """Return the raster numbers of units in the projector's order, and the pairs attended in windows (here 0)."""
        frames, rows, columns = shape
        return torch.arange(frames * rows * columns // self._square), 0


def _coarse(
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
