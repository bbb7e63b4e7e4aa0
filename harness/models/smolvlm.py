"""SmolVLM2 (Marafioti et al., 2025, arXiv 2504.05299): SigLIP on tiles, pixel shuffle, one linear map, SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    Idefics3Processor,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
)

from espalier.harness.engine.layout import VisualItem, mean_of_blocks
from espalier.harness.engine.model_parts import PixelGrids
from espalier.harness.models.adapter import Adapter, FamilyData, tiled_item
from espalier.harness.models.conversations import MARKED
from espalier.harness.models.random_weights import (
    Built,
    Value,
    text_config,
    the_tokenizer,
    token_id,
    vision_config,
)
from espalier.harness.models.view_placement import WHOLE, PictureView, ViewBox
from espalier.harness.specs.run_spec import ModelSpec

#: Marks the view of the whole picture, the last of each picture.
WHOLE_VIEW = "<global-img>"


def edge(tiles: int) -> Value:
    """Return a function that gives the size of a picture with so many tiles along its longer edge."""
    return lambda spec, _: {"longest_edge": tiles * spec.architecture["vision"]["image_size"]}


def tile_tokens(spec: ModelSpec, _: Any) -> int:
    """Return the visual tokens of a tile."""
    vision, fold = spec.architecture["vision"], spec.architecture["model"]["scale_factor"]
    return int((vision["image_size"] // vision["patch_size"] // fold) ** 2)


class SmolVLMAdapter(Adapter):
    """`SmolVLMForConditionalGeneration`: tiles 1..n of a picture in raster order, then the whole picture (view 0)."""

    data = FamilyData(
        model_class=SmolVLMForConditionalGeneration,
        conversation="smolvlm",
        media=MARKED,
        special=(
            *("<pad>", "<|im_start|>", "<end_of_utterance>"),
            *("<image>", "<fake_token_around_image>", WHOLE_VIEW),
        ),
        # It writes the same prompts for pictures; SmolVLM's own needs a package that writes numbers as words.
        processor_class=Idefics3Processor,
        part_classes={"image_processor": SmolVLMImageProcessor},
        decoder="model.text_model",
        tower="model.vision_model",
        projector="model.connector.modality_projection",
        config=Built(
            SmolVLMConfig,
            {
                "vision_config": vision_config(),
                "text_config": text_config(model_type="llama"),
                "image_token_id": token_id("<image>"),
            },
            ("architecture.model",),
        ),
        # Square tiles of the tower's size, four along the longer edge.
        processor=Built(
            Idefics3Processor,
            {
                "image_processor": Built(
                    SmolVLMImageProcessor, {"size": edge(4), "max_image_size": edge(1)}
                ),
                "tokenizer": the_tokenizer,
                "image_seq_len": tile_tokens,
            },
        ),
    )

    def to_units(self, values: Tensor) -> Tensor:
        """Average (tiles, patches, ...) over the patches that pixel shuffle merges into one unit."""
        return mean_of_blocks(values, self._side())

    def process(self, texts: list[str], pictures: list[list[Any]], clips: list[list[Any]]) -> Any:
        """Run the processor on one chat at a time, because one call requires pictures in every chat or in none."""
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
        side = self._side()
        items: list[VisualItem] = []
        first = 0
        for row in inputs["input_ids"].cpu():
            begins = torch.nonzero(row == image)[:: side**2, 0]
            # A picture ends with the run of its whole view.
            lasts = torch.nonzero(row[begins - 1] == mark)[:, 0].tolist()
            for previous, last in pairwise([-1, *lasts]):
                items.append(tiled_item(last - previous, side, first, self.patches() ** 2))
                first += (last - previous) * side**2
        return {image: items}

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
        units = self._side()
        return PixelGrids([views], [units], views.shape[-1] // units, *self.colours())

    def _side(self) -> int:
        """Return the length of a view's edge in units."""
        return int(self.patches() // self.model.config.scale_factor)
