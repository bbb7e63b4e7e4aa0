"""Models without a checkpoint: random weights and a byte-level tokenizer, for timing and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from espalier.harness.specs.run_spec import ModelSpec

#: Special tokens of all families' prompts.
SPECIAL = (
    *("<pad>", "<s>", "</s>", "<image>", "<video>"),
    *("<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<img>", "</img>", "<IMG_CONTEXT>"),
)

#: Fixed, so that weights are the same in every process.
SEED = 0


def build_random(model_class: Any, config: Any, tokenizer: Any, spec: ModelSpec) -> Any:
    """Return the model of a configuration with the library's random initialisation.

    It takes the memory of the real model; `model.scale.layers` reduces it.
    """
    with torch.random.fork_rng(), torch.device(spec.device):
        torch.manual_seed(SEED)
        model = model_class._from_config(
            config, dtype=getattr(torch, spec.dtype), attn_implementation=spec.attention
        )
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def byte_tokenizer(special: Sequence[str] = SPECIAL) -> PreTrainedTokenizerFast:
    """Return a tokenizer of special tokens and the 256 bytes, without merges, so that any text round-trips.

    Args:
        special: the tokens for padding, begin and end, possibly equal, then all others.
    """
    padding, begin, end, *extra = special
    tokens = dict.fromkeys([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=padding,
        bos_token=begin,
        eos_token=end,
        additional_special_tokens=extra,
    )
