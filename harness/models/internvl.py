"""InternVL2 to InternVL3.5: InternViT on tiles, pixel shuffle, an MLP, and one of several text stacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GotOcr2ImageProcessorPil,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
)
from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas
from transformers.utils.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from espalier.harness.engine.layout import VisualItem
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import FamilyData
from espalier.harness.models.architectures.square_views import TiledViewsAdapter
from espalier.harness.models.conversations import NUMBERED, ROWED
from espalier.harness.models.random_weights import SIGLIP_PIXELS, Built, built_processor, of
from espalier.harness.models.view_placement import PictureView
from espalier.harness.settings import Count
from espalier.harness.specs.run_spec import ModelSpec

#: The processor's names for special tokens.
TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}

#: Default of `model.processor.frame_label`: text before each frame of a video, `{}` for its number.
FRAME = "Frame{}: "

#: Supported `text_config.model_type`: FLOPs are counted and layers run on reduced sequences.
TEXTS = ("qwen2", "qwen3", "llama", "phi3")

#: Tiles of the tower's size and ImageNet's normalisation.
PIXELS = {
    "size": SIGLIP_PIXELS["size"],
    "image_mean": IMAGENET_DEFAULT_MEAN,
    "image_std": IMAGENET_DEFAULT_STD,
}


def frames_like(images: Any) -> Any:
    """Return a video processor that processes each frame as `images` processes one tile."""
    return InternVLVideoProcessor(
        size=images.size, image_mean=images.image_mean, image_std=images.image_std
    )


def label_frames(processor: Any, label: str) -> None:
    """Make a processor write `label` before each frame of a video, with the frame's number, from 1, for `{}`.

    Raises:
        UserError: the label has no `{}`.
    """
    if label == FRAME:
        return
    if "{}" not in label:
        raise UserError(
            f"model.processor.frame_label={label!r} has no {{}} for a frame's number; valid: {FRAME!r}"
        )
    placeholders = processor.image_token * processor.image_seq_length
    frame = f"{processor.start_image_token}{placeholders}{processor.end_image_token}"

    def frame_labels(video_inputs: Any, video_idx: int, **kwargs: Any) -> str:
        count = video_inputs["pixel_values_videos"][video_idx].shape[0]
        return "\n".join(label.replace("{}", str(i + 1)) + frame for i in range(count))

    processor.replace_video_token = frame_labels


class InternVLAdapter(TiledViewsAdapter):
    """`InternVLForConditionalGeneration`: tiles 1..n of an image, then its thumbnail (view 0); a frame is one tile."""

    data = FamilyData(
        model_class=InternVLForConditionalGeneration,
        conversation="internvl2",
        takes_video=True,
        media=NUMBERED,
        joins={"numbered": NUMBERED, "blank": ROWED},
        placeholders=(TOKENS["context_image_token"], TOKENS["video_token"]),
        inline=TOKENS["context_image_token"],
        # As the releases resize; torchvision's values differ at hard edges.
        part_classes={"image_processor": GotOcr2ImageProcessorPil},
        settings={
            "crop_to_patches": ("image_processor.crop_to_patches", bool),
            "min_patches": ("image_processor.min_patches", Count),
            "max_patches": ("image_processor.max_patches", Count),
            "patches_together": ("", Count | None),
            "frame_label": ("", str),
        },
        blocks="encoder.layer",
        attention="attention",
        token_ids={"image_token_id": TOKENS["context_image_token"]},
        named_tokens=TOKENS,
        processor=built_processor(
            InternVLProcessor,
            image_processor=Built(GotOcr2ImageProcessorPil, PIXELS),
            video_processor=Built(InternVLVideoProcessor, PIXELS),
            image_seq_length=of("architecture.model.image_seq_length"),
        ),
    )

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Set the label of video frames."""
        super().__init__(model, processor, spec)
        label_frames(processor, spec.processor.get("frame_label", FRAME))

    @classmethod
    def check_config(cls, config: Any, spec: ModelSpec) -> None:
        """Raise UserError for an unknown type of text stack, such as a mixture of experts."""
        model_type = config.text_config.model_type
        if model_type not in TEXTS:
            raise UserError(
                f"model={spec.name}: its text stack is of type {model_type!r}; valid: {', '.join(TEXTS)}"
            )

    @classmethod
    def adopt_processor(cls, processor: Any, spec: ModelSpec) -> Any:
        """Return the processor with tiles by `model.processor`; video frames get the size and colours of pictures.

        Converted checkpoints lack video settings, and the library's defaults resize frames to another size.
        """
        processor.video_processor = frames_like(processor.image_processor)
        return super().adopt_processor(processor, spec)

    def tower_attention(self, index: int | None) -> Any:
        """Return the attention of an encoder layer; hidden_states[-1] is the output of layers[-1]."""
        return super().tower_attention(
            self.model.config.vision_feature_layer if index is None else index
        )

    def side(self) -> int:
        """Return the length of a view's edge in units."""
        return round(self.patches() * float(self.model.config.downsample_ratio))

    def join_views(self, rows: Sequence[Tensor | None]) -> Tensor:
        """Return the tiles and frames of all chats."""
        return torch.cat([views for views in rows if views is not None])

    def process_chat(self, text: str, pictures: list[Any], clips: list[Any]) -> Any:
        """Run the processor on one prompt with its pictures and clips.

        Raises:
            UserError: clips of different lengths.
        """
        processor, spec = self.processor, self.spec
        counts = sorted({len(clip.frames) for clip in clips})
        if len(counts) > 1:
            raise UserError(
                f"one chat holds videos of {counts[0]} and {counts[-1]} frames; model={spec.name!r} takes videos of "
                "equal length in a chat; valid: a smaller model.video.frames"
            )
        size = processor.image_processor.size
        # Passed in the call because the library's defaults would otherwise override `model.processor`.
        tiles = {"crop_to_patches": spec.processor.get("crop_to_patches", True)}
        together = spec.processor.get("patches_together")
        if together is not None and pictures:
            limit = min(processor.image_processor.max_patches, together // len(pictures))
            tiles["max_patches"] = max(limit, 1)
        return self.run_processor(
            [text],
            images=pictures or None,
            videos=[clip.resized(size["width"], size["height"]) for clip in clips] or None,
            images_kwargs=tiles,
            videos_kwargs={"do_sample_frames": False},
        )

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per run of placeholders: the tiles of an image, or a frame.

        Runs end at `</img>`, and tiles have a fixed number of tokens, so the length of a run gives its tiles.
        """
        image = self.model.config.image_token_id
        items: list[VisualItem] = []
        first = 0
        for row in inputs["input_ids"].cpu() == image:
            values, lengths = torch.unique_consecutive(row, return_counts=True)
            for length in lengths[values].tolist():
                # The processor adds a thumbnail only to images of several tiles; a single tile is the whole image.
                items.append(self.tiled_item(length // self.side() ** 2, first, class_tokens=1))
                first += length
        return {image: items}

    def tiles_of(self, view: PictureView) -> tuple[int, int]:
        """Return the rows and columns of tiles of a picture.

        Raises:
            ValueError: no limit gives the view's number of tiles.
        """
        images = self.processor.image_processor
        # Under a shared limit, each of several pictures may have fewer tiles than a single one would.
        for limit in range(images.max_patches, images.min_patches - 1, -1):
            columns, rows = get_optimal_tiled_canvas(
                (view.size[1], view.size[0]),
                (images.size["height"], images.size["width"]),
                images.min_patches,
                limit,
            )
            if columns * rows == view.tiles:
                return rows, columns
        raise ValueError(f"a picture of {view.size} has {view.tiles} tiles, not {columns} x {rows}")
