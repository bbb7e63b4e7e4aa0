"""Models without a checkpoint: random weights and a byte-level tokenizer, for timing and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from espalier.harness.cost.facts import StackFacts
from espalier.harness.errors import UserError

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec

Fact = TypeVar("Fact")

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


def stated(spec: ModelSpec, name: str, fact: Fact | None) -> Fact:
    """Return a fact from which the family builds its models.

    Raises:
        UserError: it is null, as other families have it.
    """
    if fact is None:
        raise UserError(
            f"model.facts.{name}=null: model={spec.name!r} is built from it; valid: a table, as in its config file"
        )
    return fact


def text_config(spec: ModelSpec, tokenizer: Any) -> dict[str, Any]:
    """Return the text stack's sizes and special ids under transformers' keys, updated by `architecture.text`."""
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
    """Return the sizes of a CLIP-like tower, updated by `architecture.vision`.

    `architecture.unused_layers` counts layers of the checkpoint after the one that the projector reads.
    """
    return {
        "hidden_size": tower.hidden,
        "intermediate_size": tower.intermediate,
        "num_hidden_layers": tower.layers + spec.architecture.get("unused_layers", 0),
        "num_attention_heads": tower.heads,
        **spec.architecture.get("vision", {}),
    }
