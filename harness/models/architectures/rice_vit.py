"""LLaVA-OneVision-1.5's modules: RICE-ViT (Xie et al., 2025, arXiv 2507.20025) and Qwen3.

RICE-ViT has the modules of Qwen2-VL's tower, under the same tensor names, and a class token in front of each picture or
frame. Its position is a learned angle for each pair of channels, in place of the row and column that patches have.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    GenerationMixin,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLModel,
    Qwen3Config,
    Qwen3Model,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    PatchEmbed,
    Qwen2VisionTransformerPretrainedModel,
    Qwen2VLPreTrainedModel,
)
from transformers.vision_utils import get_vision_attention_seqlens, get_vision_position_ids


class RiceVisionConfig(Qwen2VLVisionConfig):
    """Qwen2-VL's tower configuration, also read from the release's keys."""

    model_type = "rice_vit"

    hidden_act: str = "gelu"
    temporal_patch_size: int = 1
    layer_norm_eps: float = 1.0e-5

    def __post_init__(self, **kwargs: Any) -> None:
        """Translate `text_hidden_size` and `intermediate_size`, which Qwen2-VL has no names for."""
        width = kwargs.pop("text_hidden_size", None)
        inner = kwargs.pop("intermediate_size", None)
        if width is not None:  # the release's `hidden_size` is the tower's own
            self.embed_dim, self.hidden_size = self.hidden_size, width
        if inner is not None:
            self.mlp_ratio = inner // self.embed_dim
        if self.temporal_patch_size != 1:
            raise ValueError(f"temporal_patch_size={self.temporal_patch_size}; valid: 1")
        super().__post_init__(**kwargs)


class LlavaOnevision15Config(Qwen2VLConfig):
    """Qwen2-VL's configuration with RICE-ViT and Qwen3."""

    model_type = "llavaonevision1_5"
    sub_configs_defaults: ClassVar[dict[str, Any]] = {
        "vision_config": RiceVisionConfig,
        "text_config": Qwen3Config,
    }


class RicePatchEmbed(PatchEmbed):
    """`PatchEmbed` without the axis of time, which the released convolution lacks."""

    def __init__(self, config: RiceVisionConfig) -> None:
        edge: Any = config.patch_size
        super().__init__(edge, 1, config.in_channels, config.embed_dim)
        proj: Any = nn.Conv2d(config.in_channels, config.embed_dim, edge, edge, bias=False)
        self.proj = proj

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return (P, D) of patches (P, 3 p p)."""
        edge: Any = self.patch_size
        pixels = hidden_states.view(-1, self.in_channels, edge, edge)
        embedded: Tensor = self.proj(pixels.to(self.proj.weight.dtype))
        return embedded.flatten(1)


class RiceVisionModel(Qwen2VisionTransformerPretrainedModel):
    """`Qwen2VisionTransformerPretrainedModel` with a class token in each picture or frame, and a first norm.

    The release's inference code leaves class tokens of earlier pictures in its output, so that from the second picture
    or frame on, a feature stands for an earlier patch. Its training code takes all of them out, as is done here.
    """

    config: RiceVisionConfig

    def __init__(self, config: RiceVisionConfig) -> None:
        super().__init__(config)
        self.patch_embed = RicePatchEmbed(config)
        width = config.embed_dim
        self.class_embedding = nn.Parameter(width**-0.5 * torch.randn(width))
        self.class_pos_emb = nn.Parameter(torch.randn(1, width // config.num_heads // 2))
        self.pre_layernorm = nn.LayerNorm(width)
        for norm in self.modules():
            if isinstance(norm, nn.LayerNorm):
                norm.eps = config.layer_norm_eps

    def forward(
        self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """Return features (P, D) and tokens (P / 4, D_text) of patches (P, 3 p p), class tokens left out.

        Args:
            hidden_states: patches of all pictures, square of merged patches by square.
            grid_thw: (pictures, 3) frames, rows and columns of patches.
            **kwargs: for the blocks.
        """
        kwargs.pop("return_dict", None)
        places = get_vision_position_ids(grid_thw, self.spatial_merge_size, kwargs=kwargs)
        bounds, longest = get_vision_attention_seqlens(grid_thw, self.config, kwargs=kwargs)
        lengths = bounds.diff().tolist()
        patches = self.patch_embed(hidden_states)
        tables = self.rotary_pos_emb(patches, places)
        angles = self.class_pos_emb[0].float().repeat(2)
        class_tables = angles.cos(), angles.sin()
        states = self.pre_layernorm(_with_class_row(patches, self.class_embedding, lengths))
        positions = [
            _with_class_row(*pair, lengths) for pair in zip(tables, class_tables, strict=True)
        ]
        for block in self.blocks:
            states = block(
                states,
                cu_seqlens=bounds + torch.arange(len(bounds)).to(bounds),
                max_seqlen=None if longest is None else longest + 1,
                position_embeddings=tuple(positions),
                **kwargs,
            )
        features = torch.cat([part[1:] for part in states.split([n + 1 for n in lengths])])
        return BaseModelOutputWithPooling(features, pooler_output=self.merger(features))


def _with_class_row(values: Tensor, first: Tensor, lengths: list[int]) -> Tensor:
    """Return (P + n, D) of n pictures: for each picture, the row `first` (D,), then its part of the values (P, D)."""
    row = first.to(values)[None]
    return torch.cat([part for run in values.split(lengths) for part in (row, run)])


class LlavaOnevision15Model(Qwen2VLModel):
    """`Qwen2VLModel` with RICE-ViT and Qwen3."""

    config: LlavaOnevision15Config

    def __init__(self, config: LlavaOnevision15Config) -> None:
        """Build the modules without the parent's constructor, which would build Qwen2-VL's first."""
        Qwen2VLPreTrainedModel.__init__(self, config)
        self.visual = RiceVisionModel._from_config(config.vision_config)
        self.language_model = Qwen3Model._from_config(config.text_config)
        self.post_init()

    def compute_3d_position_ids(self, *args: Any, **kwargs: Any) -> None:
        """Leave positions to the text stack, which counts tokens."""


class LlavaOnevision15ForConditionalGeneration(Qwen2VLForConditionalGeneration):
    """`Qwen2VLForConditionalGeneration` around a `LlavaOnevision15Model`."""

    config: LlavaOnevision15Config
    config_class = LlavaOnevision15Config

    def __init__(self, config: LlavaOnevision15Config) -> None:
        """Build the modules without the parent's constructor, which would build Qwen2-VL's first."""
        Qwen2VLPreTrainedModel.__init__(self, config)
        text: Any = config.text_config
        self.model = LlavaOnevision15Model(config)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.post_init()

    _prepare_position_ids_for_generation = GenerationMixin._prepare_position_ids_for_generation
