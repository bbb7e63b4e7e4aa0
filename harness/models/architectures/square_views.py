"""Towers of square views, as CLIP and SigLIP: a unit is a patch or the mean of a square of patches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layout import VisualItem, mean_of_blocks, rectangle
from espalier.harness.engine.model_parts import PixelGrids, TowerBlock
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter


def square_items(pictures: int, side: int, patches: int, class_tokens: int = 0) -> list[VisualItem]:
    """Return the items of pictures that are one square grid each.

    Args:
        pictures: number of pictures.
        side: tokens, which are units, along the edge of the grid.
        patches: patches along the edge of a picture.
        class_tokens: tokens of the tower for each picture, besides its patches.
    """
    units, tokens = side**2, patches**2 + class_tokens
    work = Work(tokens=tokens, pairs=tokens**2, units=units)
    return [
        VisualItem(
            rectangle(1, side, side),
            torch.arange(units * picture, units * (picture + 1)).view(-1, 1),
            work=work,
        )
        for picture in range(pictures)
    ]


class ClipTowerAdapter(Adapter):
    """A family with a projector that reads hidden_states[vision_feature_layer] of a CLIP or SigLIP tower."""

    def tower_attention(self, index: int | None) -> Any:
        """Return the attention of an encoder layer; hidden_states[-2] is the output of the last layer but one."""
        return super().tower_attention(self.read_layers() - 1 if index is None else index)

    def unread_blocks(self) -> Sequence[nn.Module]:
        """Return the encoder's layers after the one of `vision_feature_layer`."""
        return list(self.tower_layers())[self.read_layers() :]

    def tower_blocks(self) -> Sequence[TowerBlock]:
        """Return the encoder's layers up to the one of `vision_feature_layer`."""
        return [TowerBlock(layer) for layer in list(self.tower_layers())[: self.read_layers()]]

    def read_layers(self) -> int:
        """Return the number of the encoder's layers that the projector reads: hidden_states[0] is the embeddings.

        Raises:
            UserError: the checkpoint's feature layer is not one of them.
        """
        feature, depth = self.model.config.vision_feature_layer, len(self.tower.encoder.layers)
        if (
            not isinstance(feature, int)
            or not 0 < feature % (depth + 1) <= depth
            or abs(feature) > depth
        ):
            raise UserError(
                f"model: the checkpoint's vision_feature_layer={feature!r} is not a layer of a tower of {depth}; "
                f"valid in its config.json: -1 to -{depth}"
            )
        return feature % (depth + 1)


class PooledViewsAdapter(Adapter):
    """Views with units that are made of a square of patches each."""

    @abstractmethod
    def side(self) -> int:
        """Return the length of a view's edge in units."""

    def to_units(self, values: Tensor) -> Tensor:
        """Average (views, patches, ...) over the patches of each unit."""
        return mean_of_blocks(values, self.side())

    def pictures(self, inputs: Mapping[str, Any]) -> PixelGrids:
        """Return the views, each divided into units."""
        return self.pixel_grids(inputs["pixel_values"], self.side())


class TiledViewsAdapter(PooledViewsAdapter):
    """A picture is seen in tiles 1, 2, ... in raster order and then as a whole (view 0), the latter if alone."""

    @abstractmethod
    def process_chat(self, text: str, pictures: list[Any], clips: list[Any]) -> Any:
        """Run the processor on one prompt with its pictures and clips."""

    @abstractmethod
    def join_views(self, rows: Sequence[Tensor | None]) -> Tensor:
        """Return the views of a batch from those of each chat, None for a chat without."""

    def process(self, texts: list[str], pictures: list[list[Any]], clips: list[list[Any]]) -> Any:
        """Run the processor on one chat at a time.

        One call requires pictures in every chat or in none, and videos of equal length.
        """
        chats = zip(texts, pictures, clips, strict=True)
        rows = [self.process_chat(*chat) for chat in chats]
        ids = {"input_ids": [row["input_ids"][0] for row in rows]}
        batch = self.processor.tokenizer.pad(ids, padding=True, return_tensors="pt")
        views = [row.get("pixel_values") for row in rows]
        if any(view is not None for view in views):
            batch["pixel_values"] = self.join_views(views)
        return batch

    def tiled_item(self, views: int, first: int, class_tokens: int = 0) -> VisualItem:
        """Return the item of a picture.

        Args:
            views: number of views.
            first: number of the first unit.
            class_tokens: tokens of the tower for each view, besides its patches.
        """
        side, tokens = self.side(), self.patches() ** 2 + class_tokens
        units = views * side**2
        return VisualItem(
            grid=torch.cat([rectangle(1, side, side, view) for view in (*range(1, views), 0)]),
            source=torch.arange(first, first + units).view(-1, 1),
            work=Work(tokens=views * tokens, pairs=views * tokens**2, units=units),
        )
