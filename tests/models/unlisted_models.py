"""Tiny checkpoints of image-text-to-text classes of transformers that have no file in harness/models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from espalier.harness.models.random_weights import byte_tokenizer
from tests.tiny import IMAGE, VOCABULARY, sharpen

#: Special tokens by the names under which processors look for them.
TOKENS = {
    "image_token": "<image>",
    "video_token": "<video>",
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    "img_line_break_token": "<break>",
    "image_break_token": "<break>",
    "image_end_token": "<eoi>",
    "start_image_token": "<boi>",
    "end_image_token": "<eoi>",
    "context_image_token": "<IMG_CONTEXT>",
}
EXTRA = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<IMG_ATOM>")
TEMPLATE = (
    "{% for turn in messages %}{% for part in turn.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %} A:{% endif %}"
)
TEXT = {
    **{
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
    },
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8},
}
MROPE = {"rope_type": "default", "rope_theta": 1.0e4, "mrope_section": [2, 1, 1]}
VISION = {
    **{
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    **{"image_size": IMAGE, "patch_size": 7},
}
CLIP = {"model_type": "clip_vision_model", "projection_dim": 32, **VISION}
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False, **VISION}
PIXTRAL = {"model_type": "pixtral", **VISION, "image_size": 112, "head_dim": 8}
SIZE = {"height": IMAGE, "width": IMAGE}


def text(model_type: str, **changes: Any) -> dict[str, Any]:
    """Return the configuration of a text stack."""
    return {"model_type": model_type, **TEXT, **changes}


def tokenizer() -> Any:
    """Return a tokenizer of bytes with all marks."""
    made = byte_tokenizer(("<pad>", "<s>", "</s>", *TOKENS.values(), *EXTRA))
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=made.backend_tokenizer,
        **{"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"},
        extra_special_tokens=TOKENS,
    )


@dataclass(frozen=True)
class Unlisted:
    """A class: its configuration by arguments, and its processor around a tokenizer."""

    config: Any
    arguments: Mapping[str, Any]
    processor: Callable[[Any], Any]
    image: str = "<image>"
    template: str = TEMPLATE


UNLISTED = {
    "vipllava": Unlisted(
        tf.VipLlavaConfig,
        {
            "vision_config": CLIP,
            "text_config": text("llama"),
            "vision_feature_layers": [-2, 1],
        },
        lambda tok: tf.LlavaProcessor(
            tf.CLIPImageProcessor(size={"shortest_edge": IMAGE}, crop_size=SIZE),
            tok,
            patch_size=7,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
    ),
    "mistral3": Unlisted(
        tf.Mistral3Config,
        {
            "vision_config": PIXTRAL,
            "text_config": text("mistral", sliding_window=None),
            "spatial_merge_size": 2,
        },
        lambda tok: tf.PixtralProcessor(
            tf.PixtralImageProcessor(patch_size=7, size={"longest_edge": 56}),
            tok,
            patch_size=7,
            spatial_merge_size=2,
            image_token="<image>",
            image_break_token="<break>",
            image_end_token="<eoi>",
        ),
    ),
    "lighton_ocr": Unlisted(
        tf.LightOnOcrConfig,
        {"vision_config": PIXTRAL, "text_config": text("qwen3"), "spatial_merge_size": 2},
        lambda tok: tf.LightOnOcrProcessor(
            tf.PixtralImageProcessor(patch_size=14, size={"longest_edge": 56}),
            tok,
            patch_size=7,
            spatial_merge_size=2,
        ),
    ),
    "idefics3": Unlisted(
        tf.Idefics3Config,
        {
            "vision_config": {**VISION},
            "text_config": text("llama"),
            "scale_factor": 2,
        },
        lambda tok: tf.Idefics3Processor(
            tf.Idefics3ImageProcessor(
                size={"longest_edge": 2 * IMAGE}, max_image_size={"longest_edge": IMAGE}
            ),
            tok,
            image_seq_len=4,
        ),
    ),
    "aya_vision": Unlisted(
        tf.AyaVisionConfig,
        {"vision_config": SIGLIP, "text_config": text("llama"), "downsample_factor": 2},
        lambda tok: tf.AyaVisionProcessor(
            tf.GotOcr2ImageProcessor(size=SIZE, crop_to_patches=True, max_patches=4),
            tok,
            patch_size=7,
            img_size=IMAGE,
            downsample_factor=2,
            image_token="<image>",
            img_patch_token="<image>",
        ),
    ),
    "deepseek_vl": Unlisted(
        tf.DeepseekVLConfig,
        {"vision_config": SIGLIP, "text_config": text("llama")},
        lambda tok: tf.DeepseekVLProcessor(
            tf.DeepseekVLImageProcessor(size=SIZE), tok, num_image_tokens=16
        ),
    ),
    "ovis2": Unlisted(
        tf.Ovis2Config,
        {
            "vision_config": {**VISION, "vocab_size": 64, "hidden_stride": 1},
            "text_config": text("qwen2"),
            "visual_indicator_token_ids": [5, 6, 7, 8, 9],
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
        },
        lambda tok: tf.Ovis2Processor(
            tf.Ovis2ImageProcessor(size=SIZE, crop_to_patches=True), tok, image_seq_length=16
        ),
        image="<IMG_ATOM>",
    ),
    "llava_next_video": Unlisted(
        tf.LlavaNextVideoConfig,
        {
            "vision_config": CLIP,
            "text_config": text("llama"),
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
        lambda tok: tf.LlavaNextVideoProcessor(
            video_processor=tf.LlavaNextVideoVideoProcessor(),
            image_processor=tf.LlavaNextImageProcessor(
                size={"shortest_edge": IMAGE},
                crop_size=SIZE,
                image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
            ),
            tokenizer=tok,
            patch_size=7,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
    ),
    "video_llama_3": Unlisted(
        tf.VideoLlama3Config,
        {
            "text_config": text("qwen2"),
            "vision_config": {k: v for k, v in VISION.items() if k != "image_size"},
        },
        lambda tok: tf.VideoLlama3Processor(
            tf.VideoLlama3ImageProcessor(
                patch_size=7, merge_size=2, size={"shortest_edge": 196, "longest_edge": 6272}
            ),
            tok,
            tf.VideoLlama3VideoProcessor(),
        ),
    ),
    "qianfan_ocr": Unlisted(
        tf.QianfanOCRConfig,
        {
            "vision_config": {**VISION, "image_size": [IMAGE, IMAGE], "patch_size": [7, 7]},
            "text_config": text("qwen3"),
            "image_seq_length": 4,
        },
        lambda tok: tf.QianfanOCRProcessor(
            tf.GotOcr2ImageProcessor(size=SIZE, crop_to_patches=True, max_patches=4),
            tok,
            image_seq_length=4,
        ),
        image="<IMG_CONTEXT>",
    ),
    "cohere2_vision": Unlisted(
        tf.Cohere2VisionConfig,
        {
            "vision_config": SIGLIP,
            "text_config": text("cohere2", layer_types=["full_attention"] * 3, logit_scale=0.25),
            "alignment_intermediate_size": 48,
        },
        lambda tok: tf.Cohere2VisionProcessor(
            tf.Cohere2VisionImageProcessor(size=SIZE, patch_size=2, max_patches=4), tok
        ),
    ),
    "glm_ocr": Unlisted(
        tf.GlmOcrConfig,
        {
            "text_config": text("glm_ocr_text", rope_parameters=MROPE),
            "vision_config": {
                **{"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 4},
                **{"patch_size": 7, "out_hidden_size": 32},
            },
        },
        lambda tok: tf.Glm46VProcessor(
            tf.Glm46VImageProcessor(
                patch_size=7, size={"shortest_edge": 784, "longest_edge": 25088}
            ),
            tok,
            tf.Glm46VVideoProcessor(),
        ),
    ),
    "perception_lm": Unlisted(
        tf.PerceptionLMConfig,
        {
            "vision_config": {
                "model_type": "timm_wrapper",
                "architecture": "vit_pe_core_large_patch14_336",
                "do_pooling": False,
                "num_classes": 0,
                "model_args": {
                    **{"embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": [IMAGE, IMAGE]},
                    **{"patch_size": 7, "global_pool": ""},
                },
            },
            "text_config": text("llama"),
            "projector_pooling_ratio": 2,
        },
        lambda tok: tf.PerceptionLMProcessor(
            tf.PerceptionLMVideoProcessor(),
            tf.PerceptionLMImageProcessor(tile_size=IMAGE, vision_input_type="vanilla"),
            tok,
            patch_size=7,
            pooling_ratio=2,
        ),
    ),
    "janus": Unlisted(
        tf.JanusConfig,
        {
            "vision_config": {
                **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
                **{"image_size": IMAGE, "patch_size": 7, "mlp_ratio": 1.5, "projection_dim": 32},
                "num_image_tokens": 16,
            },
            "text_config": text("llama"),
            "vq_config": {
                **{"embed_dim": 4, "num_embeddings": 8, "latent_channels": 4, "base_channels": 32},
                **{"channel_multiplier": [1, 1], "num_res_blocks": 1, "projection_dim": 32},
                "image_token_embed_dim": 32,
            },
        },
        lambda tok: tf.JanusProcessor(tf.JanusImageProcessor(size=SIZE), tok, num_image_tokens=16),
    ),
    "aria": Unlisted(
        tf.AriaConfig,
        {
            "vision_config": {
                "model_type": "idefics3_vision",
                **VISION,
                "image_size": 980,
                "patch_size": 196,
            },
            "text_config": text("aria_text", moe_num_experts=4),
            "projector_patch_to_query_dict": {25: 8},
        },
        lambda tok: tf.AriaProcessor(
            tf.AriaImageProcessor(split_image=False), tok, size_conversion={980: 8}
        ),
    ),
    "gemma4": Unlisted(
        tf.Gemma4Config,
        {
            "text_config": text(
                "gemma4_text",
                vocab_size_per_layer_input=VOCABULARY,
                hidden_size_per_layer_input=8,
                layer_types=["sliding_attention"] * 2 + ["full_attention"],
            ),
            "vision_config": {**VISION, "head_dim": 8, "num_key_value_heads": 4, "patch_size": 4},
            "audio_config": None,
        },
        lambda tok: tf.Gemma4Processor(
            tf.Gemma4AudioFeatureExtractor(),
            tf.Gemma4ImageProcessor(patch_size=4, max_soft_tokens=70),
            tok,
            tf.Gemma4VideoProcessor(),
        ),
    ),
    "paligemma2": Unlisted(
        tf.PaliGemmaConfig,
        {
            "vision_config": SIGLIP,
            "text_config": text("gemma2", query_pre_attn_scalar=8),
            "projection_dim": 32,
        },
        lambda tok: tf.PaliGemmaProcessor(
            tf.SiglipImageProcessor(size=SIZE, image_seq_length=16), tok
        ),
    ),
    "paligemma": Unlisted(
        tf.PaliGemmaConfig,
        {"vision_config": SIGLIP, "text_config": text("gemma"), "projection_dim": 32},
        lambda tok: tf.PaliGemmaProcessor(
            tf.SiglipImageProcessor(size=SIZE, image_seq_length=16), tok
        ),
    ),
    "gemma3": Unlisted(
        tf.Gemma3Config,
        {
            "vision_config": SIGLIP,
            "text_config": text("gemma3_text", layer_types=["full_attention"] * 3),
            "mm_tokens_per_image": 4,
        },
        lambda tok: tf.Gemma3Processor(tf.Gemma3ImageProcessor(size=SIZE), tok, image_seq_length=4),
        template=TEMPLATE.replace("<image>", "<boi>"),
    ),
}


def save_unlisted(name: str, folder: Path) -> Path:
    """Save a tiny checkpoint of a class with random weights."""
    return save_model(UNLISTED[name], folder)


def save_model(entry: Unlisted, folder: Path) -> Path:
    """Save a tiny checkpoint of an entry with random weights."""
    tok = tokenizer()
    processor = entry.processor(tok)
    ids = {"image_token_id": tok.convert_tokens_to_ids(entry.image), "tie_word_embeddings": False}
    config = entry.config(**{**ids, **entry.arguments})
    config.image_token_id = ids["image_token_id"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = tf.AutoModelForImageTextToText.from_config(config)
    sharpen(model)
    model.generation_config.eos_token_id = None
    processor.chat_template = entry.template
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
