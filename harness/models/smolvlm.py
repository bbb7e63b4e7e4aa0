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
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
)

from espalier.harness.engine.layout import VisualItem
from espalier.harness.engine.model_parts import PixelGrids
from espalier.harness.models.adapter import FamilyData
from espalier.harness.models.architectures.square_views import TiledViewsAdapter
from espalier.harness.models.conversations import MARKED
from espalier.harness.models.random_weights import Built, Value, built_processor, text_config
from espalier.harness.models.view_placement import PictureView
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


class SmolVLMAdapter(TiledViewsAdapter):
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
        text=text_config(model_type="llama"),
        # Square tiles of the tower's size, four along the longer edge.
        processor=built_processor(
            Idefics3Processor,
            image_processor=Built(
                SmolVLMImageProcessor, {"size": edge(4), "max_image_size": edge(1)}
            ),
            image_seq_len=tile_tokens,
        ),
    )

    def side(self) -> int:
        """Return the length of a view's edge in units."""
        return int(self.patches() // self.model.config.scale_factor)

    def process_chat(self, text: str, pictures: list[Any], clips: list[Any]) -> Any:
        """Run the processor on one prompt with its pictures."""
        return self.run_processor([text], images=[pictures] if pictures else None)

    def join_views(self, rows: Sequence[Tensor | None]) -> Tensor:
        """Return as many views of each chat: the model leaves out views of zeros."""
        blank = next(views for views in rows if views is not None)[:, :0]
        filled = [blank if views is None else views for views in rows]
        n_views = max(views.shape[1] for views in filled)
        return torch.cat(
            [pad(views, (0, 0) * 3 + (0, n_views - views.shape[1])) for views in filled]
        )

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per picture: runs of equally many placeholders, the last after the mark of the whole view."""
        image = self.model.config.image_token_id
        mark = self.processor.tokenizer.convert_tokens_to_ids(WHOLE_VIEW)
        items: list[VisualItem] = []
        first = 0
        for row in inputs["input_ids"].cpu():
            begins = torch.nonzero(row == image)[:: self.side() ** 2, 0]
            # A picture ends with the run of its whole view.
            lasts = torch.nonzero(row[begins - 1] == mark)[:, 0].tolist()
            for previous, last in pairwise([-1, *lasts]):
                items.append(self.tiled_item(last - previous, first))
                first += items[-1].work.units
        return {image: items}

    def tiles_of(self, view: PictureView) -> tuple[int, int]:
        """Return the rows and columns of tiles of a picture."""
        width, height = view.size
        _, rows, columns = self.processor.image_processor.get_number_of_image_patches(height, width)
        return rows, columns

    def pictures(self, inputs: Mapping[str, Any]) -> PixelGrids:
        """Return the views without those of zeros, each divided into units."""
        views = inputs["pixel_values"].flatten(0, 1)
        return self.pixel_grids(views[views.flatten(1).any(1)], self.side())
