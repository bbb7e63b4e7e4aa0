"""The real architecture without a checkpoint: random weights and a byte-level tokenizer, for timing and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from espalier.harness.cost.facts import StackFacts

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec

#: The special tokens that any family's prompt may hold.
SPECIAL = (
    *("<pad>", "<s>", "</s>", "<image>", "<video>"),
    *("<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<img>", "</img>", "<IMG_CONTEXT>"),
)

#: Weights are the same in every process and on every run.
SEED = 0


def build_random(model_class: Any, config: Any, tokenizer: Any, spec: ModelSpec) -> Any:
    """Return the model of a configuration, weights drawn as the library initialises them.

    Memory is that of the real model; `model.scale.layers` makes it smaller.
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
    """Return a tokenizer of special tokens and the 256 bytes, without merges: any text in any language round-trips.

    Args:
        special: the tokens of padding, beginning and end, of which some may be the same, then all others.
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


def text_config(spec: ModelSpec, tokenizer: Any) -> dict[str, Any]:
    """Return the text stack's sizes and special ids in transformers' words, and what `architecture.text` adds."""
    facts = spec.facts.text
    return {
        "vocab_size": spec.facts.vocabulary,
        "hidden_size": facts.hidden,
        "intermediate_size": facts.first_intermediate or facts.intermediate,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **spec.architecture.get("text", {}),
    }


def vision_config(tower: StackFacts, spec: ModelSpec) -> dict[str, Any]:
    """Return the sizes of a CLIP-like tower, and what `architecture.vision` adds.

    `architecture.unused_layers` counts layers that the checkpoint holds but the projector never reads.
    """
    return {
        "hidden_size": tower.hidden,
        "intermediate_size": tower.intermediate,
        "num_hidden_layers": tower.layers + spec.architecture.get("unused_layers", 0),
        "num_attention_heads": tower.heads,
        **spec.architecture.get("vision", {}),
    }
