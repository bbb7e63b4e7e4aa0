"""InternVL2 to InternVL3.5: InternViT on tiles, pixel shuffle, an MLP, and one of several text stacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoProcessor,
    GotOcr2ImageProcessorPil,
    InternVLConfig,
    InternVLForConditionalGeneration,
)
from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem, mean_of_blocks, rectangle
from espalier.harness.engine.pixels import PixelGrids
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.conversations import NUMBERED, ROWED
from espalier.harness.models.internvl_processor import (
    FRAME,
    TILES,
    TOKENS,
    build_processor,
    frames_like,
    known_text,
    label_frames,
    process_chat,
    tile_settings,
)
from espalier.harness.models.loader import load_part
from espalier.harness.models.random_weights import text_config, vision_config
from espalier.harness.models.view_placement import WHOLE, PictureView, ViewBox

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec


class InternVLAdapter(Adapter):
    """`InternVLForConditionalGeneration`: tiles 1..n of an image, then its thumbnail (view 0); a frame is one tile."""

    model_class = InternVLForConditionalGeneration
    takes_video = True
    conversation: ClassVar[str] = "internvl2"
    media = NUMBERED
    joins: ClassVar[Mapping[str, str]] = {"numbered": NUMBERED, "blank": ROWED}
    placeholders = (TOKENS["context_image_token"], TOKENS["video_token"])
    inline = TOKENS["context_image_token"]
    settings = (*TILES, "patches_together", "frame_label")

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Set the label of video frames."""
        super().__init__(model, processor, spec)
        label_frames(processor, spec.processor.get("frame_label", FRAME))

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Return the checkpoint's processor; video frames get the size and normalisation of pictures.

        Converted checkpoints lack video settings, and the library's defaults resize frames to another size.
        """
        processor = load_part(spec, AutoProcessor)
        # As the releases resize; torchvision's values differ at hard edges.
        processor.image_processor = load_part(spec, GotOcr2ImageProcessorPil, **tile_settings(spec))
        processor.video_processor = frames_like(processor.image_processor)
        return processor

    @classmethod
    def checkpoint_config(cls, spec: ModelSpec) -> Any:
        """Return the checkpoint's own configuration.

        Raises:
            UserError: an unknown type of text stack, such as a mixture of experts.
        """
        return known_text(super().checkpoint_config(spec), spec)

    @classmethod
    def adopt_processor(cls, processor: Any, spec: ModelSpec) -> Any:
        """Return the caller's processor; video frames get the size and normalisation of pictures."""
        del spec
        processor.video_processor = frames_like(processor.image_processor)
        return processor

    @classmethod
    def configuration(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return the configuration of InternViT, an MLP and the text stack of `architecture.text.model_type`."""
        config = InternVLConfig(
            vision_config=vision_config(spec.facts.tower, spec),
            text_config=text_config(spec, tokenizer),
            image_token_id=tokenizer.convert_tokens_to_ids(TOKENS["context_image_token"]),
            **spec.architecture["model"],
        )
        return known_text(config, spec)

    @classmethod
    def new_processor(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return a processor with tiles of the tower's size and ImageNet's normalisation."""
        return build_processor(spec, tokenizer)

    def tower_attention(self, index: int | None) -> nn.Module:
        """Return the attention of an encoder layer; hidden_states[-1] is the output of layers[-1]."""
        layer = self.model.config.vision_feature_layer if index is None else index
        attention: nn.Module = self.model.model.vision_tower.encoder.layer[layer].attention
        return attention

    def to_units(self, values: Tensor) -> Tensor:
        """Average (tiles, patches, ...) over the patches that pixel shuffle merges into one unit."""
        _, units = self._sides()
        return mean_of_blocks(values, units)

    def process(self, texts: list[str], pictures: list[list[Any]], clips: list[list[Any]]) -> Any:
        """Run the processor on one chat at a time, because one call requires videos of equal length."""
        chats = zip(texts, pictures, clips, strict=True)
        rows = [process_chat(self, *chat) for chat in chats]
        ids = {"input_ids": [row["input_ids"][0] for row in rows]}
        batch = self.processor.tokenizer.pad(ids, padding=True, return_tensors="pt")
        pixels = [row["pixel_values"] for row in rows if "pixel_values" in row]
        if pixels:
            batch["pixel_values"] = torch.cat(pixels)
        return batch

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
                items.append(self._item(length, first))
                first += length
        return {image: items}

    def _item(self, length: int, first: int) -> VisualItem:
        """Return the item of `length` placeholders starting at projector unit `first`."""
        patches, side = self._sides()
        tiles, n_tokens = length // side**2, patches**2 + 1
        # The processor adds a thumbnail only to images of several tiles; a single tile is the whole image.
        views = [*range(1, tiles), 0]
        return VisualItem(
            grid=torch.cat([rectangle(1, side, side, view) for view in views]),
            source=torch.arange(first, first + tiles * side**2).view(-1, 1),
            work=Work(tokens=tiles * n_tokens, pairs=tiles * n_tokens**2, units=tiles * side**2),
        )

    def view_box(self, view: PictureView) -> ViewBox:
        """Return the whole picture for the thumbnail, else a tile of the picture, which is stretched to whole tiles."""
        if view.index == 0:
            return WHOLE
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
                break
        else:
            raise ValueError(
                f"a picture of {view.size} has {view.tiles} tiles, not {columns} x {rows}"
            )
        return WHOLE.cell(*divmod(view.index - 1, columns), rows, columns)

    def pictures(self, inputs: Mapping[str, Any]) -> PixelGrids:
        """Return tiles and frames, each divided into units."""
        pixels = inputs["pixel_values"]
        _, units = self._sides()
        return PixelGrids([pixels], [units], pixels.shape[-1] // units, *self.colours())

    def _sides(self) -> tuple[int, int]:
        """Return the length of a tile's edge in patches and in units."""
        vision = self.model.config.vision_config
        patches = vision.image_size[0] // vision.patch_size[0]
        return patches, round(patches * self.model.config.downsample_ratio)
