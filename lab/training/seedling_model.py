"""The seedling models: configurations, tokenizer, processor, and saving as Hugging Face folders."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from espalier.harness.seedling.scenes import PATCH, WIDTH
from espalier.harness.seedling.vocabulary import BOS, EOS, IMAGE, PAD, TOKEN_ID, VOCABULARY

if TYPE_CHECKING:
    from transformers import (
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedModel,
        PreTrainedTokenizerFast,
        ProcessorMixin,
    )

NAMES = ("seedling", "seedling_full", "seedling_draft")
"""The autoregressive models."""
DENOISER = "seedling_diffusion"
"""The model that denoises its answers, with the layers of "seedling"."""
LAYERS = {"seedling": 6, "seedling_full": 6, "seedling_draft": 2, DENOISER: 6}
VISUAL_TOKENS = (WIDTH // PATCH) ** 2
POSITIONS = 512
FEATURE_LAYER = -2
"""Hidden state of the tower that the language model reads, as in LLaVA."""

#: Configuration of the tower, and what the text stacks share, of the models for pictures and for videos.
TOWER: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": WIDTH,
    "patch_size": PATCH,
    "projection_dim": 128,
    "hidden_act": "gelu",
}
TEXT: Mapping[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'USER: ' }}{% else %}{{ 'ASSISTANT: ' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] | trim + ' ' }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image> ' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}"
    "{{ part['text'] | trim + ' ' }}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def build_model(name: str = "seedling", init_range: float = 0.02) -> LlavaForConditionalGeneration:
    """Return a randomly initialised model.

    Args:
        name: One of :data:`LAYERS`.
        init_range: Standard deviation of the language model's initial weights.

    Returns:
        A float32 model on CPU.
    """
    # Imported here: transformers takes seconds, and many importers need only the sizes.
    from transformers import CLIPVisionConfig, LlamaConfig

    text = LlamaConfig(
        vocab_size=len(VOCABULARY),
        num_hidden_layers=LAYERS[name],
        max_position_embeddings=POSITIONS,
        initializer_range=init_range,
        **TEXT,
    )
    return llava_of(CLIPVisionConfig(**TOWER), text, VISUAL_TOKENS)


def llava_of(vision: Any, text: Any, visual_tokens: int) -> LlavaForConditionalGeneration:
    """Return a LLaVA with random weights of the configurations of a tower and a text stack."""
    # Imported here: transformers takes seconds.
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        projector_hidden_act="gelu",
        vision_feature_select_strategy="default",
        vision_feature_layer=FEATURE_LAYER,
        tie_word_embeddings=True,
        image_seq_length=visual_tokens,
    )
    config.architectures = ["LlavaForConditionalGeneration"]
    return LlavaForConditionalGeneration(config)


def normalise(images: np.ndarray | torch.Tensor) -> torch.Tensor:
    """Return uint8 images ``(B, 96, 96, 3)`` as float ``(B, 3, 96, 96)`` in -1..1, like the processor."""
    return torch.as_tensor(images).permute(0, 3, 1, 2).float().mul_(2 / 255).sub_(1)


def build_tokenizer(
    token_id: Mapping[str, int] = TOKEN_ID,
    positions: int = POSITIONS,
    media: Sequence[str] = ("<image>",),
) -> PreTrainedTokenizerFast:
    """Return the word-level tokenizer: one token per space-separated word, after ``<bos>``."""
    # Imported here: transformers takes seconds.
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(dict(token_id), unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=list(media),
        padding_side="left",
        model_max_length=positions,
    )


def build_processor(
    width: int = WIDTH, tokenizer: PreTrainedTokenizerFast | None = None
) -> LlavaProcessor:
    """Return the processor: tokenizer, CLIP image processor and chat template.

    Args:
        width: Side of the pictures in pixels.
        tokenizer: Tokenizer; None for that of the models of :data:`LAYERS`.
    """
    # Imported here: half a second for transformers.
    import transformers

    # The PIL variant works without torchvision and gives the same pixels everywhere.
    build = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)
    images = build(
        size={"height": width, "width": width},
        do_resize=True,
        do_center_crop=False,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return transformers.LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer or build_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=CHAT_TEMPLATE,
    )


def save_model(
    model: PreTrainedModel, folder: Path, processor: ProcessorMixin | None = None, longest: int = 80
) -> str:
    """Save a model and its processor as a Hugging Face folder in float16.

    Tower keys are written in the older ``vision_tower.vision_model.*`` form, which all versions of
    transformers load completely; older versions load the new form with a random tower.

    Args:
        model: The model; converted to float16 in place.
        folder: Folder to write.
        processor: Processor; None for that of the models of :data:`LAYERS`.
        longest: Most tokens of an answer.

    Returns:
        The sha256 of the weights file.
    """
    # Imported here: half a second for transformers.
    from transformers import GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        do_sample=False,
        max_new_tokens=longest,
    )
    model.half().save_pretrained(folder)
    (processor or build_processor()).save_pretrained(folder)
    path = folder / "model.safetensors"
    weights = {portable_key(key): value for key, value in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)
    return file_sha256(path)


def portable_key(key: str) -> str:
    """Return the name of a weight in a file that every version of transformers loads completely."""
    return re.sub(r"^((?:model\.)?vision_tower\.)(?!vision_model\.)", r"\1vision_model.", key)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
