"""The embedded video models: LLaVA-OneVision at toy size, with the tower and text stack of `seedling`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier.harness.seedling import weights_dir
from espalier.harness.seedling.scenes import GRID, WIDTH
from espalier.harness.seedling.video.events import TOKEN_ID, VIDEO, WORDS
from espalier.harness.seedling.vocabulary import IMAGE
from lab.training.seedling_model import (
    FEATURE_LAYER,
    TEXT,
    TOWER,
    VISUAL_TOKENS,
    build_tokenizer,
    save_model,
)

if TYPE_CHECKING:
    from transformers import (
        LlavaOnevisionForConditionalGeneration,
        LlavaOnevisionProcessor,
        PreTrainedTokenizerFast,
    )

VIDEO_LAYERS = {"seedling_video": 8, "seedling_video_draft": 3}
FRAME_TOKENS = (GRID // 2) ** 2
"""Tokens of a frame after LLaVA-OneVision's pooling of 2 x 2 patches."""
POSITIONS = 16384

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'USER: ' }}{% else %}{{ 'ASSISTANT: ' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] | trim + ' ' }}{% else %}"
    "{% for part in message['content'] if part['type'] in ('image', 'video') %}"
    "{{ '<' + part['type'] + '> ' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}"
    "{{ part['text'] | trim + ' ' }}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def video_weights_dir(name: str = "seedling_video") -> Path:
    """Return the folder of a shipped video model, one of :data:`VIDEO_LAYERS`."""
    if name not in VIDEO_LAYERS:
        raise ValueError(f"unknown video model {name!r}; choose one of {', '.join(VIDEO_LAYERS)}")
    return weights_dir().parent / name


def build_video_model(
    name: str = "seedling_video", layers: int | None = None
) -> LlavaOnevisionForConditionalGeneration:
    """Return a randomly initialised model in float32 on CPU.

    Args:
        name: One of :data:`VIDEO_LAYERS`.
        layers: Number of language layers, for tests; None: that of the model.
    """
    # Imported here: transformers takes seconds, and many importers need only the sizes.
    from transformers import (
        CLIPVisionConfig,
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        Qwen2Config,
    )

    text = Qwen2Config(
        vocab_size=len(WORDS),
        num_hidden_layers=layers or VIDEO_LAYERS[name],
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.05,
        **TEXT,
    )
    config = LlavaOnevisionConfig(
        vision_config=CLIPVisionConfig(**TOWER),
        text_config=text,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        projector_hidden_act="gelu",
        vision_feature_select_strategy="default",
        vision_feature_layer=FEATURE_LAYER,
        image_grid_pinpoints=[[WIDTH, WIDTH]],
        tie_word_embeddings=True,
    )
    config.architectures = ["LlavaOnevisionForConditionalGeneration"]
    return LlavaOnevisionForConditionalGeneration(config)


def build_video_tokenizer() -> PreTrainedTokenizerFast:
    """Return the word-level tokenizer: one token per space-separated word, after ``<bos>``."""
    return build_tokenizer(TOKEN_ID, POSITIONS, ("<image>", "<video>"))


def build_video_processor() -> LlavaOnevisionProcessor:
    """Return the processor: tokenizer, image and video processors and chat template."""
    # Imported here: half a second for transformers.
    import transformers

    # The PIL variant works without torchvision and gives the same pixels everywhere.
    images = getattr(
        transformers, "LlavaOnevisionImageProcessorPil", transformers.LlavaOnevisionImageProcessor
    )
    pixels: dict[str, Any] = {
        "size": {"height": WIDTH, "width": WIDTH},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    return transformers.LlavaOnevisionProcessor(
        image_processor=images(**pixels, image_grid_pinpoints=[[WIDTH, WIDTH]]),
        video_processor=transformers.LlavaOnevisionVideoProcessor(**pixels),
        tokenizer=build_video_tokenizer(),
        num_image_tokens=VISUAL_TOKENS + 1,  # the class token, which the strategy removes
        vision_feature_select_strategy="default",
        vision_aspect_ratio="anyres_max_9",
        chat_template=CHAT_TEMPLATE,
    )


def save_video_model(model: Any, folder: Path) -> str:
    """Save a model and its processor as a Hugging Face folder in float16; returns the weights' sha256.

    Args:
        model: The model; converted to float16 in place.
        folder: Folder to write.
    """
    return save_model(model, folder, build_video_processor(), longest=256)
