"""Molmo2 (Clark et al., 2026, arXiv 2601.10611): SigLIP 2 on a picture and its crops, attention pooling, Qwen3.

A query, the mean of 2 x 2 patches of the plane of crops (3 x 3 of a frame), attends to these patches. Units are
patches, a token is their mean in features and in signals of the tower, and merged tokens are made of projected ones.
All visual tokens and marks of a prompt see one another, also across pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    Molmo2ForConditionalGeneration,
    Molmo2ImageProcessor,
    Molmo2Processor,
    Molmo2VideoProcessor,
)

from espalier.harness.cost.facts import Work
from espalier.harness.engine.layer_inputs import JoinedPictures
from espalier.harness.engine.layout import Layout, VisualItem, framed_rectangle
from espalier.harness.engine.model_parts import PixelGrids, coarse
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter, FamilyData
from espalier.harness.models.conversations import TEXTS
from espalier.harness.models.random_weights import (
    SIGLIP_PIXELS,
    Built,
    Value,
    built_processor,
    of,
    text_config,
    vision_config,
)
from espalier.harness.settings import Count
from espalier.harness.specs.run_spec import ModelSpec, Separators

#: Tokens around and between visual tokens, by the keys of the configuration that name them.
MARKS = {
    "image_start_token_id": "<im_start>",
    "image_end_token_id": "<im_end>",
    "image_patch_id": "<im_patch>",
    "low_res_image_start_token_id": "<low_res_im_start>",
    "frame_start_token_id": "<frame_start>",
    "frame_end_token_id": "<frame_end>",
}

#: Heads of the tower and of the projector, by the keys of the configuration.
HEADS: Mapping[str, Value] = {
    "num_attention_heads": of("facts.tower.heads"),
    "num_key_value_heads": of("facts.tower.kv_heads"),
    "head_dim": of("facts.tower.head_dim"),
}

#: Sizes of an image processor: those of the tower.
VIEWS: Mapping[str, Value] = {
    "size": SIGLIP_PIXELS["size"],
    "patch_size": of("architecture.vision.patch_size"),
}


def square_tower(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the tower's sizes, with height and width of its pictures."""
    return {**sizes, "image_size": 2 * [sizes["image_size"]]}


def read_layers(spec: ModelSpec, _: Any) -> list[int]:
    """Return the layers that the projector reads; a tower scaled down ends before the last of the release."""
    return [min(n, spec.facts.tower.layers - 1) for n in spec.architecture["vision_feature_layer"]]


class Molmo2Adapter(Adapter):
    """`Molmo2ForConditionalGeneration`: the whole picture (view 0), then the plane of its crops (view 1).

    Marks around a view, and newlines after its rows, are never pruned. Frames of a video have one view each.
    """

    data = FamilyData(
        model_class=Molmo2ForConditionalGeneration,
        conversation="molmo2",
        takes_video=True,
        one_placeholder=True,
        layer_types=JoinedPictures,
        attentions=("sdpa", "eager"),
        masks="has visual tokens that see one another, which needs a mask",
        media=TEXTS,
        placeholders=("<|image|>", "<|video|>"),
        inline=None,
        processor_class=Molmo2Processor,
        settings={"max_crops": ("image_processor.max_crops", Count)},
        special=(
            *("<|endoftext|>", "<|im_end|>", "<|im_end|>", "<|im_start|>"),
            *(*MARKS.values(), "<im_col>", "<im_low>", "<|image|>", "<|video|>"),
        ),
        blocks="layers",
        vision=Built(square_tower, {"sizes": vision_config(**HEADS)}),
        text=text_config(head_dim=of("facts.text.head_dim")),
        config={
            "adapter_config": Built(
                dict,
                {
                    **HEADS,
                    "vision_feature_layer": read_layers,
                    "hidden_size": lambda spec, _: spec.facts.projector[1],
                    "intermediate_size": lambda spec, _: spec.facts.projector[-2],
                    "text_hidden_size": of("facts.text.hidden"),
                },
            ),
        },
        token_ids=MARKS,
        processor=built_processor(
            Molmo2Processor,
            image_processor=Built(Molmo2ImageProcessor, VIEWS, ("architecture.crops",)),
            video_processor=Built(Molmo2VideoProcessor, VIEWS),
        ),
    )

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Refuse decoders made of OLMo, with other layers than Qwen3's."""
        text = model.config.text_config
        scaled = len(text.rope_scaling_layers) == text.num_hidden_layers
        if text.norm_after or text.qk_norm_type != "qwen3" or not scaled:
            raise UserError(
                f"model={spec.name}: its decoder has OLMo's layers (norm_after, qk_norm_type or rope_scaling_layers of "
                "config.json), which are not proved here; valid: releases with Qwen3, as Molmo2-4B"
            )
        super().__init__(model, processor, spec)

    def tower_attention(self, index: int | None) -> Any:
        """Return the attention of a tower layer; by default, of the last that the projector reads."""
        last = max(self.model.config.adapter_config.vision_feature_layer)
        return super().tower_attention(last if index is None else index)

    process = Adapter.process_in_order

    def layout(self, inputs: Mapping[str, Any], separators: Separators = "keep") -> Layout:
        """Read the layout; marks and newlines are tokens of their own, and count as placeholders."""
        ids = inputs["input_ids"]
        is_mark = torch.isin(ids, torch.tensor(self.processor.image_token_ids, device=ids.device))
        merged = ids.masked_fill(is_mark, self.model.config.image_token_id)
        return super().layout({**inputs, "input_ids": merged}, separators)

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per picture or per video."""
        processor = self.processor
        pooling = inputs.get("image_token_pooling", inputs.get("video_token_pooling"))
        items: list[VisualItem] = []
        first, start = 0, 0
        for rows, columns, plane_rows, plane_columns in _grids(inputs, "image_grids"):
            newlines = processor.image_use_col_tokens
            single = processor.use_single_crop_col_tokens
            picture = framed_rectangle(rows, columns, newlines if single is None else single)
            views = [
                (0, 0, *picture),
                (0, 1, *framed_rectangle(plane_rows, plane_columns, newlines)),
            ]
            end = start + rows * columns + plane_rows * plane_columns
            crops = int(inputs["image_num_crops"][len(items)])
            items.append(self._item(views, pooling[start:end].cpu(), crops, first))
            first, start = first + items[-1].work.tokens, end
        for frames, rows, columns in _grids(inputs, "video_grids"):
            frame = framed_rectangle(rows, columns, processor.video_use_col_tokens)
            views = [(number, 0, *frame) for number in range(frames)]
            end = start + frames * rows * columns
            items.append(self._item(views, pooling[start:end].cpu(), frames, None))
            start = end
        return {self.model.config.image_token_id: items}

    def _item(
        self,
        views: Sequence[tuple[int, int, Tensor, Tensor]],
        pooling: Tensor,
        crops: int,
        first: int | None,
    ) -> VisualItem:
        """Return the item of a picture or a video.

        Args:
            views: frame, number, places and cells of each.
            pooling: (tokens, slots) patches of each token, -1 for none.
            crops: calls of the tower.
            first: number of a picture's first patch; None: a video.
        """
        grids = [
            pad(pad(places, (1, 0), value=view), (1, 0), value=frame)
            for frame, view, places, _ in views
        ]
        prunable = torch.cat([cells for *_, cells in views])
        source = torch.zeros(len(prunable), pooling.shape[1], dtype=torch.long)
        source[prunable] = pooling.clamp(min=0).long()
        share = torch.full(source.shape, 1 / pooling.shape[1])
        is_patch = pooling >= 0
        share[prunable] = is_patch / is_patch.sum(1, keepdim=True)
        patches = self.model.config.vision_config.num_position_embeddings
        tile = None
        if first is not None:
            tile = torch.zeros(len(prunable), dtype=torch.long)
            tile[prunable] = (pooling.amax(1).long() - first) // patches
        tokens = crops * patches
        work = Work(tokens, tokens * patches, units=len(pooling), pooled=pooling.numel())
        return VisualItem(torch.cat(grids), source, share, prunable, tile, work)

    def pictures(self, inputs: Mapping[str, Any]) -> PixelGrids:
        """Return the views, each divided into patches."""
        edge = self.model.config.vision_config.patch_size
        views = [self._views(value) for name, value in inputs.items() if name.startswith("pixel_")]
        return PixelGrids(views, [views[0].shape[-1] // edge], edge, *self.colours())

    def coarse_inputs(self, inputs: Mapping[str, Any], share: float) -> dict[str, Any]:
        """Return inputs with coarse views, which the processor has cut into patches (views, P, p p 3)."""
        edge = self.model.config.vision_config.patch_size
        changed = dict(inputs)
        for name, value in inputs.items():
            if name.startswith("pixel_"):
                grids = (
                    coarse(self._views(value), share)
                    .unflatten(3, (-1, edge))
                    .unflatten(2, (-1, edge))
                )
                changed[name] = grids.permute(0, 2, 4, 3, 5, 1).reshape(value.shape)
        return changed

    def _views(self, patches: Tensor) -> Tensor:
        """Return the views (n, 3, S, S) of patches (n, P, p p 3)."""
        vision = self.model.config.vision_config
        edge, side = vision.patch_size, vision.image_size[0] // vision.patch_size
        grids = patches.unflatten(2, (edge, edge, 3)).unflatten(1, (side, side))
        return cast("Tensor", grids.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3))


def _grids(inputs: Mapping[str, Any], name: str) -> list[list[int]]:
    """Return the sides of each item's views, by an input that a batch may lack."""
    return inputs[name].tolist() if name in inputs else []
