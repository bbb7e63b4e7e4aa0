"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: images of any size, videos, 2 x 2 patches merged inside the tower.

Qwen2.5-VL's tower has window attention in most layers. Qwen3-VL adds features of earlier tower layers in the decoder,
and writes times between frames. Qwen3.5 (Qwen Team, 2026) is Qwen3-VL without these features, and three of four decoder
layers have linear attention (gated delta net, transformers' `Qwen3_5GatedDeltaNet`) with one state of constant size.
Dropped tokens leave no trace in the states of later layers. To mask them would not be the same: their places still pass
through the convolution and fade the state, so that methods cannot be emulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem, rectangle
from espalier.harness.engine.model_parts import coarse
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter, FamilyData
from espalier.harness.models.conversations import BARE, TIMED
from espalier.harness.models.llava_onevision import HALF
from espalier.harness.models.random_weights import (
    Built,
    Value,
    of,
    text_config,
    the_tokenizer,
    token_id,
)
from espalier.harness.settings import Count
from espalier.harness.specs.run_spec import ModelSpec

#: Token types of the library's processors.
TEXT, IMAGE, VIDEO = range(3)


def released_positions(
    input_ids: Tensor,
    mm_token_type_ids: Tensor,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    attention_mask: Tensor | None = None,
    second_per_grid_ts: Any = None,
    *,
    side: int,
    pace: float | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Return time, height and width of each token, and the next token's position minus the row's length.

    It replaces the library's `get_rope_index` and has the same first arguments.

    Args:
        input_ids: (B, L).
        mm_token_type_ids: (B, L) TEXT, IMAGE or VIDEO.
        image_grid_thw: (images, 3) frames, rows and columns of patches.
        video_grid_thw: (videos, 3), the same.
        attention_mask: (B, L) 0 for padding, which gets position 0.
        second_per_grid_ts: seconds between frames of `video_grid_thw`, for each video; None: one second.
        side: patches along the edge of a visual token.
        pace: position steps per second of a video; None: one step per frame.
        **kwargs: other arguments of `generate`, ignored.

    Returns:
        positions: (3, B, L).
        deltas: (B, 1).

    Raises:
        ValueError: the number of placeholders does not match the pictures.
    """
    blocks = {
        IMAGE: _blocks(image_grid_thw, side, None, None),
        VIDEO: _blocks(video_grid_thw, side, second_per_grid_ts, pace),
    }
    kinds = mm_token_type_ids.cpu()
    valid = torch.ones_like(kinds) if attention_mask is None else attention_mask.cpu()
    positions = torch.zeros(3, *kinds.shape, dtype=input_ids.dtype)
    deltas = []
    for row, real in enumerate(valid.bool()):
        places = _row(kinds[row, real].tolist(), blocks)
        positions[:, row, real] = places
        deltas.append([int(places.max()) + 1 - places.shape[1]])
    device = input_ids.device
    return positions.to(device), torch.tensor(deltas, device=device)


def _row(kinds: list[int], blocks: dict[int, Iterator[Tensor]]) -> Tensor:
    """Return the positions (3, T) of one prompt's tokens."""
    parts, start = [], 0
    for run_kind, run in groupby(kinds):
        remaining = len(list(run))
        while remaining > 0:
            # Adjacent pictures form one run.
            block = (
                torch.arange(remaining).expand(3, -1)
                if run_kind == TEXT
                else next(blocks[run_kind], None)
            )
            if block is None or block.shape[1] > remaining:
                raise ValueError(f"{remaining} placeholders are left for which there is no picture")
            parts.append(block + start)
            remaining -= block.shape[1]
            start = int(parts[-1].max()) + 1
    return torch.cat(parts, 1)


def _blocks(grids: Tensor | None, side: int, seconds: Any, pace: float | None) -> Iterator[Tensor]:
    """Yield the positions (3, T) of each picture or video, relative to its start."""
    shapes = [] if grids is None else grids.tolist()
    for number, (frames, rows, columns) in enumerate(shapes):
        time = torch.arange(frames)
        if pace is not None:
            step = 1.0 if seconds is None else float(seconds[number])
            # Single precision, factor by factor, truncated: as the released code rounds time.
            time = (time * step * pace).long()
        axes = (time, torch.arange(rows // side), torch.arange(columns // side))
        yield torch.cartesian_prod(*axes).T


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

#: Special tokens by the keys of the configuration for their numbers.
MARKS = {
    **{"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
    **{"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"},
}

#: Sizes of Qwen2-VL's tower.
QWEN2_TOWER: Mapping[str, Value] = {
    "depth": of("facts.tower.layers"),
    "embed_dim": of("facts.tower.hidden"),
    "num_heads": of("facts.tower.heads"),
    "mlp_ratio": lambda spec, _: spec.facts.tower.intermediate // spec.facts.tower.hidden,
    "hidden_size": of("facts.text.hidden"),
}

#: Sizes of towers that state their width and the decoder's.
TOWER: Mapping[str, Value] = {
    "depth": of("facts.tower.layers"),
    "hidden_size": of("facts.tower.hidden"),
    "intermediate_size": of("facts.tower.intermediate"),
    "num_heads": of("facts.tower.heads"),
    "out_hidden_size": of("facts.text.hidden"),
}


def qwen_config(
    config_class: Any,
    tower: Mapping[str, Value],
    text: Mapping[str, Value] | None = None,
    marks: Mapping[str, str] = MARKS,
) -> Built:
    """Return how a configuration of tower and text stack is built.

    Args:
        config_class: class of the configuration.
        tower: arguments of the tower.
        text: arguments of the text stack besides its sizes.
        marks: special tokens by the keys for their numbers.
    """
    arguments = {
        "vision_config": Built(dict, tower, ("architecture.vision",)),
        "text_config": text_config(**(text or {})),
        **{key: token_id(mark) for key, mark in marks.items()},
    }
    return Built(config_class, arguments, ("architecture.model",))


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
    return Built(processor_class, {**built, "tokenizer": the_tokenizer})


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

    data = FamilyData(
        model_class=Qwen2VLForConditionalGeneration,
        conversation="qwen_1_5",
        takes_video=True,
        media=BARE,
        placeholders=("<|image_pad|>", "<|video_pad|>"),
        inline=None,
        lacking=("luma",),  # the tower gets a list of patches, from pictures of any size
        settings={**BOUNDS, **CAP},
        tower="model.visual",
        projector="model.visual.merger",
        config=qwen_config(Qwen2VLConfig, QWEN2_TOWER),
        processor=patch_processor(Qwen2VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor),
    )

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Replace the library's rule for positions of videos with the released one if they differ."""
        super().__init__(model, processor, spec)
        if self.data.library_positions:
            return
        side = model.config.vision_config.spatial_merge_size
        model.model.get_rope_index = partial(released_positions, side=side, pace=self.pace)

    @classmethod
    def adopt_processor(cls, processor: Any, spec: ModelSpec) -> Any:
        """Return the processor with the picture sizes of `model.processor`."""
        if CAP.items() <= cls.data.settings.items():
            # Without a value, the library warns at every video.
            videos = processor.video_processor
            videos.cap_pixels_per_frame = bool(videos.cap_pixels_per_frame)
        return super().adopt_processor(processor, spec)

    # ------------------------------------------------------------------ parts

    @property
    def pace(self) -> float | None:
        """Position steps per second of a video; None: one step per pair of frames."""
        return None

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
        return cast(
            "Tensor", self.projector(features.reshape(features.shape[0] * self._square, -1))
        )

    @property
    def _square(self) -> int:
        """Number of patches that the projector merges into one token."""
        return int(self.model.config.vision_config.spatial_merge_size) ** 2

    # ------------------------------------------------------------------ inputs

    def process(self, texts: list[str], pictures: list[list[Any]], clips: list[list[Any]]) -> Any:
        """Run the processor on pictures and clips in the order of their placeholders."""
        return self.process_in_order(texts, pictures, clips)

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per image, then per video, as the tower gets them: units in raster order, frame by frame."""
        config, first = self.model.config, 0
        names = {config.image_token_id: "image_grid_thw", config.video_token_id: "video_grid_thw"}
        items: dict[int, list[VisualItem]] = {token: [] for token in names}
        for token, name in names.items():
            for shape in inputs[name].tolist() if name in inputs else []:
                side = config.vision_config.spatial_merge_size
                item = merged_item(shape, side, first, *self.order(shape), self.data.class_tokens)
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


def full_blocks(spec: ModelSpec, _: Any) -> list[int]:
    """Return the numbers of the blocks with full attention: they are evenly spaced and include the last."""
    tower = spec.facts.tower
    spanning = tower.layers - tower.window_layers
    return [(n + 1) * tower.layers // spanning - 1 for n in range(spanning)]


class Qwen25VLAdapter(Qwen2VLAdapter):
    """`Qwen2_5_VLForConditionalGeneration`: tower and projector process units window by window."""

    data = replace(
        Qwen2VLAdapter.data,
        model_class=Qwen2_5_VLForConditionalGeneration,
        config=qwen_config(Qwen2_5_VLConfig, {**TOWER, "fullatt_block_indexes": full_blocks}),
        processor=patch_processor(
            Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor
        ),
    )

    @property
    def pace(self) -> float | None:
        """Position steps per second of a video, from the checkpoint's configuration."""
        return float(self.model.config.vision_config.tokens_per_second)

    def global_blocks(self) -> Sequence[int]:
        """Return the numbers of the blocks with full attention."""
        return cast("Sequence[int]", self.model.config.vision_config.fullatt_block_indexes)

    def tower_windows(self) -> int:
        """Return the number of blocks with window attention."""
        return len(self.tower_layers()) - len(self.global_blocks())

    def order(self, shape: Sequence[int]) -> tuple[Tensor, int]:
        """Return the units window by window, and the pairs of patches attended in windows; see `window_order`."""
        config = self.model.config.vision_config
        side = config.window_size // config.spatial_merge_size // config.patch_size
        return window_order(shape, config.spatial_merge_size, side)


#: Sizes of the tower, and the layers with features for the decoder.
DEEP_TOWER: Mapping[str, Value] = {
    **TOWER,
    "deepstack_visual_indexes": lambda spec, _: list(spec.facts.deepstack),
}


class Qwen3VLAdapter(Qwen2VLAdapter):
    """`Qwen3VLForConditionalGeneration`: each pair of a video's frames follows its time in the prompt."""

    data = replace(
        Qwen2VLAdapter.data,
        model_class=Qwen3VLForConditionalGeneration,
        conversation="qwen3",
        media=TIMED,
        library_positions=True,  # each pair of frames has positions of its own, after its time as text
        config=qwen_config(Qwen3VLConfig, DEEP_TOWER),
        processor=patch_processor(
            Qwen3VLProcessor,
            Qwen2VLImageProcessor,
            Qwen3VLVideoProcessor,
            image_mean=HALF,
            image_std=HALF,
        ),
    )

    def deepstack(self) -> Mapping[int, nn.Module]:
        """Return the mergers of the tower layers with features that the decoder adds to visual tokens."""
        tower = self.tower
        if not hasattr(tower, "deepstack_merger_list"):  # Qwen3.5's
            return {}
        return dict(zip(tower.deepstack_visual_indexes, tower.deepstack_merger_list, strict=True))


class Qwen3VLMoeAdapter(Qwen3VLAdapter):
    """`Qwen3VLMoeForConditionalGeneration`: a router sends each token to a few experts of every decoder layer."""

    data = replace(
        Qwen3VLAdapter.data,
        model_class=Qwen3VLMoeForConditionalGeneration,
        config=qwen_config(Qwen3VLMoeConfig, DEEP_TOWER),
        loads_shared=False,  # there, transformers 5.23 leaves stored experts transposed
    )


#: The linear layers, by the keys of the text stack's configuration.
LINEAR: Mapping[str, Value] = {
    "head_dim": of("facts.text.head_dim"),
    "full_attention_interval": of("facts.text.linear.interval"),
    "linear_num_key_heads": of("facts.text.linear.key_heads"),
    "linear_num_value_heads": of("facts.text.linear.value_heads"),
    "linear_key_head_dim": of("facts.text.linear.key_dim"),
    "linear_value_head_dim": of("facts.text.linear.value_dim"),
}


class Qwen35Adapter(Qwen3VLAdapter):
    """`Qwen3_5ForConditionalGeneration`: full layers between layers of linear attention."""

    data = replace(
        Qwen3VLAdapter.data,
        model_class=Qwen3_5ForConditionalGeneration,
        conversation="qwen3_5",
        config=qwen_config(Qwen3_5Config, DEEP_TOWER, LINEAR),
    )


class Qwen35MoeAdapter(Qwen35Adapter):
    """`Qwen3_5MoeForConditionalGeneration`: a router sends each token to a few experts, and a gate to one for all."""

    data = replace(
        Qwen35Adapter.data,
        model_class=Qwen3_5MoeForConditionalGeneration,
        config=qwen_config(Qwen3_5MoeConfig, DEEP_TOWER, LINEAR),
    )
