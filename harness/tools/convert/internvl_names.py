"""From the names of InternVL's releases to the library's, where one tensor may become three."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from espalier.harness.tools.convert.shards import Fused, Rename

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

    def rename(name: str) -> str | Fused | None:
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
