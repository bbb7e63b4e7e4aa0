"""DiffusionGemma (Google, 2026): Gemma 4's tower and stack fill a cache, against which a second denoises a canvas.

The stack that methods see, here the decoder, is the class's encoder: it reads the prompt, visual tokens included, and
each finished canvas. The class's second stack has the same weights; every step of a canvas reads the first one's cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    Gemma4AudioFeatureExtractor,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
    GenerationConfig,
)
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
    EntropyBoundSamplerConfig,
)

from espalier.harness.cost.facts import CanvasFacts, Work
from espalier.harness.engine.layer_inputs import FULL, SLIDING, LayerTypes
from espalier.harness.engine.layout import VisualItem, rectangle
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.chat_batches import tensor_to
from espalier.harness.models.conversations import TURNED
from espalier.harness.models.loader import load_part
from espalier.harness.models.random_weights import stated, text_config, vision_config

if TYPE_CHECKING:
    from espalier.harness.specs.generation import CanvasSettings
    from espalier.harness.specs.run_spec import ModelSpec

#: Placeholder of a picture; the processor adds its tokens and its marks.
IMAGE = "<|image|>"

#: Special tokens by the processor's names for them; it needs those of audio too.
MARKS = {
    **{"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": IMAGE},
    **{"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"},
}


class DiffusionGemmaAdapter(Adapter):
    """`DiffusionGemmaForBlockDiffusion`: a picture of any shape is a grid of tokens, each the mean of 3x3 patches.

    Pictures are padded to one number of patches, which attention in the tower does not tell apart: signals that the
    tower's queries and keys give are lacking.
    """

    model_class = DiffusionGemmaForBlockDiffusion
    conversation: ClassVar[str] = "gemma4"
    media = TURNED
    joins: ClassVar[Mapping[str, str]] = {}
    placeholders = (IMAGE,)
    inline = IMAGE
    pieces = "begun"
    special = (
        *("<pad>", "<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"),
        *MARKS.values(),
    )
    lacking = (
        *("cls_attention", "cls_logits", "wide_cls_attention", "tower_received", "tower_keys"),
        *("wide_tower_keys", "tower_states", "luma"),
    )

    def __init__(self, model: Any, processor: Any, spec: ModelSpec) -> None:
        """Give the model generation settings of its class, with the special tokens of the checkpoint alone."""
        super().__init__(model, processor, spec)
        tokens: GenerationConfig = model.generation_config
        model.generation_config = DiffusionGemmaGenerationConfig(
            bos_token_id=tokens.bos_token_id,
            eos_token_id=tokens.eos_token_id,
            pad_token_id=self.pad_id,
        )

    @classmethod
    def check_settings(cls, spec: ModelSpec) -> None:
        """Raise UserError for attention other than sdpa: the library cannot mask a padded batch's canvas for others."""
        super().check_settings(spec)
        if spec.attention != "sdpa":
            raise UserError(
                f"model.attention={spec.attention!r}: model={spec.name!r} needs masks of pictures that see one another "
                "and of padded canvases, which transformers 5.23 makes for one kind; valid: sdpa"
            )

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Return the checkpoint's processor."""
        return load_part(spec, Gemma4Processor)

    @classmethod
    def configuration(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return the configuration of Gemma 4's tower and of the stack of experts.

        Raises:
            UserError: the facts state no full layers or no canvas.
        """
        facts, tower = spec.facts.text, spec.facts.tower
        wide = stated(spec, "text.wide", facts.wide)
        canvas = stated(spec, "canvas", spec.facts.canvas)
        heads = {"num_key_value_heads": tower.kv_heads, "head_dim": tower.head_dim}
        text = {
            "head_dim": facts.head_dim,
            "global_head_dim": wide.head_dim,
            "num_global_key_value_heads": wide.kv_heads,
            "num_experts": facts.experts,
            "layer_types": [
                SLIDING if facts.heads_of(layer) is facts else FULL for layer in range(facts.layers)
            ],
        }
        return DiffusionGemmaConfig(
            text_config={
                **text,
                **text_config(spec, tokenizer),
                "intermediate_size": canvas.intermediate,
            },
            vision_config={
                "model_type": "gemma4_vision",
                **vision_config(tower, spec),
                **heads,
            },
            canvas_length=canvas.length,
            **{
                f"{name}_token_id": tokenizer.convert_tokens_to_ids(MARKS[f"{name}_token"])
                for name in ("boi", "eoi", "image")
            },
            **spec.architecture["model"],
        )

    @classmethod
    def new_processor(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return a processor with Gemma 4's preprocessing for the tower's patches."""
        tokenizer._set_model_specific_special_tokens(MARKS)
        vision = spec.architecture["vision"]
        sizes = {name: vision[name] for name in ("patch_size", "pooling_kernel_size")}
        images = Gemma4ImageProcessor(**sizes, max_soft_tokens=spec.facts.visual_tokens)
        sound = Gemma4AudioFeatureExtractor()  # a required argument of the processor
        return Gemma4Processor(sound, images, tokenizer, Gemma4VideoProcessor(**sizes))

    @property
    def _encoder(self) -> Any:
        return self.model.model.encoder

    @property
    def decoder(self) -> Any:
        """The stack that reads the prompt."""
        return self._encoder.language_model

    @property
    def canvas(self) -> Any:
        """The stack that denoises."""
        return self.model.model.decoder

    @property
    def canvas_facts(self) -> CanvasFacts:
        """The sizes of a canvas."""
        width = self.canvas.self_conditioning.down_proj.in_features
        return CanvasFacts(int(self.model.config.canvas_length), width)

    def canvas_config(self, settings: CanvasSettings) -> DiffusionGemmaGenerationConfig:
        """Return the class's settings of an answer, with the special tokens of the checkpoint."""
        tokens = self.model.generation_config
        return DiffusionGemmaGenerationConfig(
            max_new_tokens=settings.length,
            max_denoising_steps=settings.steps,
            sampler_config=EntropyBoundSamplerConfig(settings.entropy_bound),
            t_min=settings.t_min,
            t_max=settings.t_max,
            stability_threshold=settings.stability_threshold,
            confidence_threshold=settings.confidence_threshold,
            bos_token_id=tokens.bos_token_id,
            eos_token_id=tokens.eos_token_id,
            pad_token_id=tokens.pad_token_id,
        )

    @cached_property
    def layer_types(self) -> LayerTypes:
        """Sliding and full layers; a picture is seen whole in both."""
        return LayerTypes(self.decoder, cut=False)

    @property
    def tower(self) -> nn.Module:
        """Gemma 4's tower, with the step that averages patches."""
        tower: nn.Module = self._encoder.vision_tower
        return tower

    @property
    def projector(self) -> nn.Module:
        """The norm and the linear map to the width of the decoder."""
        projector: nn.Module = self._encoder.embed_vision
        return projector

    def tower_attention(self, index: int | None) -> nn.Module:
        """Return the attention of a tower layer; by default, of the last."""
        layer = self._encoder.vision_tower.encoder.layers[-1 if index is None else index]
        attention: nn.Module = layer.self_attn
        return attention

    def to_device(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch on the model's device; pixels stay in single precision, in which the tower scales them."""
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        return {name: tensor_to(value, self.device, dtype) for name, value in batch.items()}

    def items(self, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[VisualItem]]:
        """Return one item per picture: tokens in raster order."""
        side = int(self.model.config.vision_config.pooling_kernel_size)
        items, first = [], 0
        for places in inputs.get("image_position_ids", ()):
            columns, rows = (places.amax(0) + 1).tolist()
            grid = rectangle(1, rows // side, columns // side)
            patches, units = len(places), len(grid)  # padding runs as well
            source = torch.arange(first, first + units).view(-1, 1)
            work = Work(tokens=patches, pairs=patches**2, units=units)
            items.append(VisualItem(grid, source, work=work))
            first += units
        return {self.model.config.image_token_id: items}
