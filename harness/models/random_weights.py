"""Models without a checkpoint, for timing and tests: configurations, processors, random weights, a byte tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from espalier.harness.errors import UserError
from espalier.harness.specs.run_spec import ModelSpec

#: Reads an argument from the model's part of the run and the tokenizer.
Value = Callable[["ModelSpec", Any], Any]

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


@dataclass(frozen=True)
class Built:
    """A configuration or processor of the library for random weights, or a part of one.

    Attributes:
        part_class: class, or function, that gets the arguments.
        arguments: values, or functions of the model's part of the run and of the tokenizer that return them.
        updates: paths of tables in the model's part of the run with arguments that win over those.
    """

    part_class: Callable[..., Any]
    arguments: Mapping[str, Any]
    updates: tuple[str, ...] = ()

    def __call__(self, spec: ModelSpec, tokenizer: Any) -> Any:
        """Return the part.

        Raises:
            UserError: the model's file lacks a table of facts.
        """
        values = {
            name: value(spec, tokenizer) if callable(value) else value
            for name, value in self.arguments.items()
        }
        for path in self.updates:
            values |= _read(spec, path, {})
        return self.part_class(**values)


def of(path: str) -> Value:
    """Return a function that reads a value of the model's part of the run, as `facts.text.hidden`."""
    return lambda spec, tokenizer: _read(spec, path)


def token_id(token: str) -> Value:
    """Return a function that gives the number of a token."""
    return lambda spec, tokenizer: tokenizer.convert_tokens_to_ids(token)


def built_processor(part_class: Callable[..., Any], **arguments: Any) -> Built:
    """Return how a processor around the tokenizer is built."""
    return Built(part_class, {"tokenizer": lambda spec, tokenizer: tokenizer, **arguments})


def text_config(*updates: str, **arguments: Any) -> Built:
    """Return the text stack's sizes and special ids under transformers' keys, and `architecture.text`."""
    return Built(dict, {**TEXT, **arguments}, ("architecture.text", *updates))


def vision_config(**arguments: Any) -> Built:
    """Return the sizes of a CLIP-like tower, and `architecture.vision`.

    `architecture.unused_layers` counts layers of the checkpoint after the one that the projector reads.
    """
    return Built(dict, {**TOWER, **arguments}, ("architecture.vision",))


def _read(spec: ModelSpec, path: str, default: Any = None) -> Any:
    """Return the value at a path; a table that does not state it gives the default, if there is one.

    Raises:
        UserError: a part of the path is null, as other families have it.
    """
    value: Any = spec
    names = path.split(".")
    for number, name in enumerate(names):
        if value is None:
            raise UserError(
                f"model.{'.'.join(names[:number])}=null: model={spec.name!r} is built from it; valid: a table, as in "
                "its config file"
            )
        if not isinstance(value, Mapping):
            value = getattr(value, name)
        elif name in value or default is None:
            value = value[name]
        else:
            return default
    return value


TEXT: Mapping[str, Value] = {
    "vocab_size": of("facts.vocabulary"),
    "hidden_size": of("facts.text.hidden"),
    "intermediate_size": lambda spec, tokenizer: (
        spec.facts.text.first_intermediate or spec.facts.text.intermediate
    ),
    "num_hidden_layers": of("facts.text.layers"),
    "num_attention_heads": of("facts.text.heads"),
    "num_key_value_heads": of("facts.text.kv_heads"),
    "pad_token_id": lambda spec, tokenizer: tokenizer.pad_token_id,
    "bos_token_id": lambda spec, tokenizer: tokenizer.bos_token_id,
    "eos_token_id": lambda spec, tokenizer: tokenizer.eos_token_id,
}

TOWER: Mapping[str, Value] = {
    "hidden_size": of("facts.tower.hidden"),
    "intermediate_size": of("facts.tower.intermediate"),
    "num_hidden_layers": lambda spec, tokenizer: (
        spec.facts.tower.layers + spec.architecture.get("unused_layers", 0)
    ),
    "num_attention_heads": of("facts.tower.heads"),
}

#: The layers of linear attention, by the keys of Qwen3.5's text stack.
LINEAR: Mapping[str, Value] = {
    "head_dim": of("facts.text.head_dim"),
    "full_attention_interval": of("facts.text.linear.interval"),
    "linear_num_key_heads": of("facts.text.linear.key_heads"),
    "linear_num_value_heads": of("facts.text.linear.value_heads"),
    "linear_key_head_dim": of("facts.text.linear.key_dim"),
    "linear_value_head_dim": of("facts.text.linear.value_dim"),
}

_EDGE = of("architecture.vision.image_size")

#: Mean and standard deviation of SigLIP's pixels.
HALF = [0.5, 0.5, 0.5]

#: SigLIP's preprocessing at the tower's size.
SIGLIP_PIXELS: Mapping[str, Any] = {
    "size": Built(dict, {"height": _EDGE, "width": _EDGE}),
    "image_mean": HALF,
    "image_std": HALF,
}

#: Sizes of an image processor for CLIP: those of the tower.
CLIP_SIZES: Mapping[str, Value] = {
    "size": Built(dict, {"shortest_edge": _EDGE}),
    "crop_size": Built(dict, {"height": _EDGE, "width": _EDGE}),
}


def clip_processor(processor_class: Any, images: Built) -> Built:
    """Return how a processor with CLIP's preprocessing is built."""
    return built_processor(
        processor_class,
        image_processor=images,
        patch_size=of("architecture.vision.patch_size"),
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )
