"""LLaVA-1.5 and everything with its architecture: CLIP tower with a class token, MLP projector, Llama text stack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoProcessor, LlavaForConditionalGeneration

from harness.adapters.base import Adapter
from harness.adapters.loading import load_checked
from harness.engine.layout import Layout

if TYPE_CHECKING:
    from harness.config.spec import ModelSpec


class LlavaAdapter(Adapter):
    """`LlavaForConditionalGeneration`: every image gives one square grid of tokens, all of them prunable."""

    @classmethod
    def load(cls, spec: ModelSpec) -> LlavaAdapter:
        """Load from a local directory or the hub cache."""
        model, processor = load_checked(spec, LlavaForConditionalGeneration, AutoProcessor)
        return cls(model, processor, spec.facts)

    @property
    def decoder(self) -> Any:
        """The Llama stack."""
        return self.model.model.language_model

    @property
    def tower(self) -> nn.Module:
        """The CLIP tower."""
        tower: nn.Module = self.model.model.vision_tower
        return tower

    @property
    def projector(self) -> nn.Module:
        """The two-layer MLP."""
        projector: nn.Module = self.model.model.multi_modal_projector
        return projector

    def tower_layer(self, index: int | None) -> Any:
        """Return an encoder layer; hidden_states[-2] is the output of the last layer but one."""
        layers = self.model.model.vision_tower.encoder.layers
        if index is None:
            feature = self.model.config.vision_feature_layer
            # hidden_states holds the embeddings first, so entry f is the output of layer f - 1.
            index = feature - 1 if feature >= 0 else len(layers) + feature
        return layers[index]

    def layout(self, inputs: Mapping[str, Any]) -> Layout:
        """Every `<image>` position is a patch, images in order, patches in raster order."""
        ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
        is_visual = ids == self.model.config.image_token_id
        counts = is_visual.sum(1).tolist()
        width = max(counts)
        visual = torch.argsort((~is_visual).to(torch.int8), dim=1, stable=True)[:, :width]
        config = self.model.config.vision_config
        side = config.image_size // config.patch_size
        patch = torch.arange(width, device=ids.device) % side**2
        image = torch.arange(width, device=ids.device) // side**2
        grid = torch.stack([image, torch.zeros_like(image), patch // side, patch % side], dim=1)
        first = torch.tensor([0, *counts[:-1]], device=ids.device).cumsum(0)
        source = first[:, None] + torch.arange(width, device=ids.device)
        limit = max(sum(counts) - 1, 0)
        lengths = mask.sum(1).tolist()
        return Layout(
            valid=mask,
            visual=visual,
            counts=tuple(counts),
            text=tuple(n - v for n, v in zip(lengths, counts, strict=True)),
            grid=grid.expand(ids.shape[0], -1, -1),
            source=source.clamp(max=limit),
        )
