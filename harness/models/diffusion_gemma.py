"""DiffusionGemma (Google, 2026): Gemma 4's tower and stack fill a cache, against which a second denoises a canvas.

The stack that methods see, here the decoder, is the class's encoder: it reads the prompt, visual tokens included, and
each finished canvas. The class's second stack has the same weights; every step of a canvas reads the first one's cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import (
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
from espalier.harness.models.adapter import Adapter, FamilyData, tensor_to
from espalier.harness.models.conversations import TURNED
from espalier.harness.models.random_weights import (
    Built,
    built_processor,
    of,
    text_config,
    vision_config,
)
from espalier.harness.specs.generation import CanvasSettings
from espalier.harness.specs.run_spec import ModelSpec

#: Placeholder of a picture; the processor adds its tokens and its marks.
IMAGE = "<|image|>"

#: Special tokens by the processor's names for them; it needs those of audio too.
MARKS = {
    **{"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": IMAGE},
    **{"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"},
}


#: Sizes of a processor of pictures: those of the tower.
POOLED = {name: of(f"architecture.vision.{name}") for name in ("patch_size", "pooling_kernel_size")}


def types_of_layers(spec: ModelSpec, _: Any) -> list[str]:
    """Return the type of each layer."""
    facts = spec.facts.text
    return [SLIDING if facts.heads_of(layer) is facts else FULL for layer in range(facts.layers)]


class DiffusionGemmaAdapter(Adapter):
    """`DiffusionGemmaForBlockDiffusion`: a picture of any shape is a grid of tokens, each the mean of 3x3 patches.

    Pictures are padded to one number of patches, which attention in the tower does not tell apart: signals that the
    tower's queries and keys give are lacking.
    """

    data = FamilyData(
        model_class=DiffusionGemmaForBlockDiffusion,
        conversation="gemma4",
        media=TURNED,
        placeholders=(IMAGE,),
        inline=IMAGE,
        pieces="begun",
        layer_types=partial(LayerTypes, cut=False),  # a picture is seen whole in both types
        attentions=("sdpa",),
        masks="needs masks of pictures that see one another and of padded canvases, which transformers 5.23 makes for "
        "one kind",
        special=(
            *("<pad>", "<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"),
            *MARKS.values(),
        ),
        named_tokens=MARKS,
        lacking=(
            *("cls_attention", "cls_logits", "wide_cls_attention", "tower_received", "tower_keys"),
            *("wide_tower_keys", "tower_states", "luma"),
        ),
        processor_class=Gemma4Processor,
        decoder="model.encoder.language_model",
        tower="model.encoder.vision_tower",
        projector="model.encoder.embed_vision",
        vision=vision_config(
            model_type="gemma4_vision",
            num_key_value_heads=of("facts.tower.kv_heads"),
            head_dim=of("facts.tower.head_dim"),
        ),
        text=text_config(
            head_dim=of("facts.text.head_dim"),
            global_head_dim=of("facts.text.wide.head_dim"),
            num_global_key_value_heads=of("facts.text.wide.kv_heads"),
            num_experts=of("facts.text.experts"),
            layer_types=types_of_layers,
            intermediate_size=of("facts.canvas.intermediate"),
        ),
        config={"canvas_length": of("facts.canvas.length")},
        token_ids={f"{name}_token_id": MARKS[f"{name}_token"] for name in ("boi", "eoi", "image")},
        processor=built_processor(
            Gemma4Processor,
            feature_extractor=Built(Gemma4AudioFeatureExtractor, {}),  # required
            image_processor=Built(
                Gemma4ImageProcessor, {**POOLED, "max_soft_tokens": of("facts.visual_tokens")}
            ),
            video_processor=Built(Gemma4VideoProcessor, POOLED),
        ),
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
