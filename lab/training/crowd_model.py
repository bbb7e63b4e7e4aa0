"""The model of crowded scenes: seedling's layers for four times its visual tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from espalier.harness.seedling import weights_dir
from espalier.harness.seedling.crowd import GRID, SIDE, TOKEN_ID
from espalier.harness.seedling.scenes import PATCH
from espalier.harness.seedling.vocabulary import BOS, EOS, PAD
from lab.training.seedling_model import build_processor, build_tokenizer, llava_of, save_model

if TYPE_CHECKING:
    from transformers import LlavaForConditionalGeneration

CROWD = "seedling_crowd"
CROWD_TOKENS = GRID * GRID
CROWD_POSITIONS = 1024
ROPE_THETA = 100000.0
"""Seedling's is 10,000; longer waves suit four times the distance."""
TOWER_WIDTH = 144
"""Seedling's 128, and 16 that keep a patch from attending to other quarters of the picture."""


def crowd_weights_dir() -> Path:
    """Return the folder of the shipped model."""
    return weights_dir().parent / CROWD


def build_crowd_model(layers: int = 6) -> LlavaForConditionalGeneration:
    """Return a randomly initialised model in float32 on CPU.

    Args:
        layers: Number of language layers; fewer for tests.
    """
    # Imported here: transformers takes seconds, and many importers need only the sizes.
    from transformers import CLIPVisionConfig, LlamaConfig

    vision = CLIPVisionConfig(
        hidden_size=TOWER_WIDTH,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=TOWER_WIDTH,
        hidden_act="gelu",
    )
    text = LlamaConfig(
        vocab_size=len(TOKEN_ID),
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=CROWD_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return llava_of(vision, text, CROWD_TOKENS)


def save_crowd_model(model: LlavaForConditionalGeneration, folder: Path) -> str:
    """Save a model and its processor in float16, see :func:`save_model`; returns the weights' sha256."""
    tokenizer = build_tokenizer(TOKEN_ID, CROWD_POSITIONS)
    return save_model(model, folder, build_processor(SIDE, tokenizer))
