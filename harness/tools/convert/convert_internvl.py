"""Convert an original release of InternVL2, 2.5, 3 or 3.5 (internvl_chat) to a checkpoint that the project loads."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import (
    GenerationConfig,
    GotOcr2ImageProcessor,
    InternVLForConditionalGeneration,
    InternVLProcessor,
)
from transformers.utils.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from espalier.harness.models.internvl import frames_like
from espalier.harness.specs.commands import command_parser
from espalier.harness.tools.convert.checkpoint_writer import (
    Checkpoint,
    Say,
    check_tokens,
    open_release,
    run_conversion,
    write_checkpoint,
)
from espalier.harness.tools.convert.internvl_config import configuration
from espalier.harness.tools.convert.internvl_prompt import read_prompt
from espalier.harness.tools.convert.internvl_tokens import build_tokenizer, read_tokens
from espalier.harness.tools.convert.shards import Fused, Parts, Rename

_LAYER = re.compile(r"(vision_model\.encoder|language_model\.model)\.layers\.(\d+)\.(.+)")

#: Outside of layers.
_PARTS = {
    "vision_model.embeddings.class_embedding": "model.vision_tower.embeddings.cls_token",
    "vision_model.embeddings.position_embedding": "model.vision_tower.embeddings.position_embeddings",
    "vision_model.embeddings.patch_embedding.": "model.vision_tower.embeddings.patch_embeddings.projection.",
    "mlp1.0.": "model.multi_modal_projector.layer_norm.",
    "mlp1.1.": "model.multi_modal_projector.linear_1.",
    "mlp1.3.": "model.multi_modal_projector.linear_2.",
    "language_model.model.tok_embeddings.": "model.language_model.embed_tokens.",
    "language_model.model.embed_tokens.": "model.language_model.embed_tokens.",
    "language_model.model.norm.": "model.language_model.norm.",
    "language_model.output.": "lm_head.",
    "language_model.lm_head.": "lm_head.",
}

#: Inside a layer of InternViT.
_VIT = {
    "norm1.": "layernorm_before.",
    "norm2.": "layernorm_after.",
    "ls1": "lambda_1",
    "ls2": "lambda_2",
    "attn.proj.": "attention.projection_layer.",
    "attn.q_norm.": "attention.q_norm.",
    "attn.k_norm.": "attention.k_norm.",
    "mlp.": "mlp.",
}

#: Inside a layer of InternLM2; the other text stacks have the library's names.
_INTERNLM2 = {
    "attention.wo.": "self_attn.o_proj.",
    "feed_forward.w1.": "mlp.gate_proj.",
    "feed_forward.w3.": "mlp.up_proj.",
    "feed_forward.w2.": "mlp.down_proj.",
    "attention_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
}


def renamer(config: Any) -> Rename:
    """Return the map of a release's names for a model of an InternVLConfig."""
    text, width = config.text_config, config.vision_config.hidden_size
    head = text.hidden_size // text.num_attention_heads
    query, value = head * text.num_attention_heads, head * text.num_key_value_heads
    names = _INTERNLM2 if text.model_type == "llama" else {"": ""}

    def rename(name: str) -> str | Parts | None:
        layer = _LAYER.fullmatch(name)
        if layer is None:
            return _swap(name, _PARTS)
        stack, number, suffix = layer.groups()
        if stack == "vision_model.encoder":
            place = f"model.vision_tower.encoder.layer.{number}."
            if suffix.startswith("attn.qkv."):
                kind = suffix.removeprefix("attn.qkv.")
                return Fused({f"{place}attention.{letter}_proj.{kind}": width for letter in "qkv"})
            return _swap(suffix, _VIT, place)
        place = f"model.language_model.layers.{number}."
        if suffix == "attention.wqkv.weight" and names is _INTERNLM2:
            # For each key head its query heads, the key and the value.
            rows = {"q": query, "k": value, "v": value}
            return Fused(
                {f"{place}self_attn.{letter}_proj.weight": n for letter, n in rows.items()},
                groups=text.num_key_value_heads,
            )
        return _swap(suffix, names, place)

    return rename


def _swap(name: str, table: Mapping[str, str], place: str = "") -> str | None:
    for old, new in table.items():
        if name.startswith(old):
            return place + new + name.removeprefix(old)
    return None


def build_processor(release: Mapping[str, Any], config: Any, tokenizer: Any, template: str) -> Any:
    """Return the processor: tiles as the release cuts them, and its chat template."""
    side = config.vision_config.image_size[0]
    images = GotOcr2ImageProcessor(
        size={"height": side, "width": side},
        image_mean=IMAGENET_DEFAULT_MEAN,
        image_std=IMAGENET_DEFAULT_STD,
        crop_to_patches=True,
        min_patches=release.get("min_dynamic_patch", 1),
        max_patches=release.get("max_dynamic_patch", 12),
    )
    return InternVLProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=frames_like(images),
        image_seq_length=config.image_seq_length,
        chat_template=template,
    )


def convert(source: Path, target: Path, say: Say) -> None:
    """Write a checkpoint that the InternVL models load with model.path=<target>.

    Args:
        source: directory of the release: config.json, conversation.py, tokenizer files, safetensors shards.
        target: directory to write, new or empty.
        say: called with progress lines.

    Raises:
        UserError: the release is incomplete, of another kind, holds unknown tensors, or `target` is in use.
    """
    release = open_release(source, target)
    heads = ("language_model.output.weight", "language_model.lm_head.weight")
    own_head = any(name in release.shapes for name in heads)
    # Checked before the tokenizer, which a release of another kind need not have; its id is filled in below.
    config = configuration(release.config, 0, own_head)
    prompt = read_prompt(source / "conversation.py", str(release.config.get("template")))
    tokens = read_tokens(source)
    check_tokens(tokens.backend.get_vocab_size(), config.text_config.vocab_size)
    tokenizer, template = build_tokenizer(tokens, prompt)
    processor = build_processor(release.config, config, tokenizer, template)
    config.image_token_id = processor.image_token_id
    checkpoint = Checkpoint(
        model_class=InternVLForConditionalGeneration,
        config=config,
        processor=processor,
        generation=GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            # The end of a turn alone, as in the release's `chat`.
            eos_token_id=tokenizer.convert_tokens_to_ids(prompt.ends["user"].strip()),
            pad_token_id=tokenizer.pad_token_id,
        ),
        rename=renamer(config),
        optional=() if own_head else ("lm_head.weight",),
    )
    write_checkpoint(release, checkpoint, target, say)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = command_parser("convert internvl", __doc__, "/models/InternVL2-8B /models/internvl")
    return run_conversion(parser, convert, arguments)


if __name__ == "__main__":
    sys.exit(main())
