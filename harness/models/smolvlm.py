"""SmolVLM2 (Marafioti et al., 2025, arXiv 2504.05299): SigLIP on tiles, pixel shuffle, one linear map, SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import (
    Idefics3Processor,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
)

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem, mean_of_blocks, rectangle
from espalier.harness.engine.pixels import PixelGrids
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.conversations import MARKED
from espalier.harness.models.loader import load_part
from espalier.harness.models.random_weights import text_config, vision_config
from espalier.harness.models.view_placement import WHOLE, PictureView, ViewBox

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec

#: Marks the view of the whole picture, the last of each picture.
WHOLE_VIEW = "<global-img>"


class SmolVLMAdapter(Adapter):
    """`SmolVLMForConditionalGeneration`: tiles 1..n of a picture in raster order, then the whole picture (view 0)."""

    model_class = SmolVLMForConditionalGeneration
    conversation: ClassVar[str] = "smolvlm"
    media = MARKED
    joins: ClassVar[Mapping[str, str]] = {}
    special = (
        *("<pad>", "<|im_start|>", "<end_of_utterance>"),
        *("<image>", "<fake_token_around_image>", WHOLE_VIEW),
    )

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Return the processor of SmolVLM's predecessor, which writes the same prompts for pictures.

        SmolVLM's own needs a package that writes numbers as words, for videos.
        """
        processor = load_part(spec, Idefics3Processor)
        processor.image_processor = load_part(spec, SmolVLMImageProcessor)
        return processor

    @classmethod
    def configuration(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return the configuration of SigLIP, pixel shuffle and Llama."""
        return SmolVLMConfig(
            vision_config=vision_config(spec.facts.tower, spec),
            text_config={"model_type": "llama", **text_config(spec, tokenizer)},
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            **spec.architecture["model"],
        )

    @classmethod
    def new_processor(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return a processor with square tiles of the tower's size, four along the longer edge."""
        vision, fold = spec.architecture["vision"], spec.architecture["model"]["scale_factor"]
        side = vision["image_size"]
        images = SmolVLMImageProcessor(
            size={"longest_edge": 4 * side}, max_image_size={"longest_edge": side}
        )
        patches: int = side // vision["patch_size"]
        return Idefics3Processor(images, tokenizer, image_seq_len=(patches // fold) ** 2)

    @property
    def decoder(self) -> Any:
        """The text stack."""
        return self.model.model.text_model

    @property
    def tower(self) -> nn.Module:
        """The SigLIP encoder."""
        tower: nn.Module = self.model.model.vision_model
        return tower

    @property
    def projector(self) -> nn.Module:
        """The linear map after pixel shuffle."""
        projector: nn.Module = self.model.model.connector.modality_projection
        return projector

    def tower_attention(self, index: int | None) -> nn.Module:
        """Return the attention of an encoder layer; by default, of the last."""
        layers = self.model.model.vision_model.encoder.layers
        attention: nn.Module = layers[-1 if index is None else index].self_attn
        return attention

    def to_units(self, values: Tensor) -> Tensor:
        """Average (tiles, patches, ...) over the patches that pixel shuffle merges into one unit."""
        _, units = self._sides()
        return mean_of_blocks(values, units)

    def process(self, texts: list[str], pictures: list[list[Any]], clips: list[list[Any]]) -> Any:
        """Run the processor on one chat at a time, because one call requires pictures in every chat or in none."""
        del clips
        chats = zip(texts, pictures, strict=True)
        rows = [
            self.run_processor([text], images=[views] if views else None) for text, views in chats
        ]
        ids = {"input_ids": [row["input_ids"][0] for row in rows]}
        batch = self.processor.tokenizer.pad(ids, padding=True, return_tensors="pt")
        n_views = max(
            (row["pixel_values"].shape[1] for row in rows if "pixel_values" in row), default=0
        )
        if n_views:
            # The model leaves out views of zeros.
            blank = next(row["pixel_values"] for row in rows if "pixel_values" in row)[:, :0]
            pixels = [row.get("pixel_values", blank) for row in rows]
            batch["pixel_values"] = torch.cat(
                [pad(views, (0, 0) * 3 + (0, n_views - views.shape[1])) for views in pixels]
            )
        return batch

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per picture: runs of equally many placeholders, the last after the mark of the whole view."""
        image = self.model.config.image_token_id
        mark = self.processor.tokenizer.convert_tokens_to_ids(WHOLE_VIEW)
        _, side = self._sides()
        items: list[VisualItem] = []
        first = 0
        for row in inputs["input_ids"].cpu():
            # A picture ends with the run of its whole view.
            views = int((row == image).sum()) // side**2
            begins = torch.nonzero(row == image)[:: side**2, 0][:views]
            lasts = torch.nonzero(row[begins - 1] == mark)[:, 0].tolist() if views else []
            start = 0
            for last in lasts:
                items.append(self._item(last + 1 - start, first))
                first += (last + 1 - start) * side**2
                start = last + 1
        return {image: items}

    def _item(self, views: int, first: int) -> VisualItem:
        """Return the item of a picture of `views` views starting at projector unit `first`."""
        patches, side = self._sides()
        n_units, n_tokens = views * side**2, patches**2
        return VisualItem(
            grid=torch.cat([rectangle(1, side, side, view) for view in (*range(1, views), 0)]),
            source=torch.arange(first, first + n_units).view(-1, 1),
            work=Work(tokens=views * n_tokens, pairs=views * n_tokens**2, units=n_units),
        )

    def view_box(self, view: PictureView) -> ViewBox:
        """Return the whole picture for view 0, else a tile of the picture, which is stretched to whole tiles."""
        if view.index == 0:
            return WHOLE
        width, height = view.size
        _, rows, columns = self.processor.image_processor.get_number_of_image_patches(height, width)
        row, column = divmod(view.index - 1, columns)
        return WHOLE.cell(row, column, rows, columns)

    def pictures(self, inputs: Mapping[str, Any]) -> PixelGrids:
        """Return the views, each divided into units."""
        views = inputs["pixel_values"].flatten(0, 1)
        views = views[views.flatten(1).any(1)]
        _, units = self._sides()
        return PixelGrids([views], [units], views.shape[-1] // units, *self.colours())

    def _sides(self) -> tuple[int, int]:
        """Return the length of a view's edge in patches and in units."""
        vision = self.model.config.vision_config
        patches: int = vision.image_size // vision.patch_size
        return patches, patches // self.model.config.scale_factor
