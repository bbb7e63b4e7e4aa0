"""The sizes that a DeepSeek-OCR checkpoint's own config.json states, in the words of the library's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Sizes of the decoder, under the same names in the release's `language_config` and in the library.
TEXT = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "moe_intermediate_size", "n_routed_experts"),
    *("num_experts_per_tok", "n_shared_experts", "mlp_layer_types", "first_k_dense_replace"),
)

#: Sizes of CLIP and of SAM in the library, and by what name the release's `vision_config.width` gives them.
TOWER = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": None,
}
STEM = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "mlp_dim": None,
    "global_attn_indexes": "global_attn_indexes",
}


@dataclass(frozen=True)
class Sizes:
    """What a config.json states of each stack; nothing where it is silent."""

    text: Mapping[str, Any] = field(default_factory=dict)
    tower: Mapping[str, Any] = field(default_factory=dict)
    stem: Mapping[str, Any] = field(default_factory=dict)


def released_sizes(config: Mapping[str, Any]) -> Sizes:
    """Read the release's config.json."""
    width = _table(_table(config, "vision_config"), "width")
    clip, sam = _table(width, "clip-l-14-224"), _table(width, "sam_vit_b")
    return Sizes(
        text=_by_name(_table(config, "language_config"), {name: name for name in TEXT}),
        tower=_by_name(clip, TOWER),
        stem=_by_name(sam, STEM),
    )


def library_sizes(config: Any) -> Sizes:
    """Read a configuration of the library's own class."""
    vision = config.vision_config

    def values(part: Any, names: Any) -> dict[str, Any]:
        return {name: getattr(part, name) for name in names if hasattr(part, name)}

    return Sizes(
        text=values(config.text_config, TEXT),
        tower=values(vision.encoder_config, TOWER),
        stem=values(vision.sam_config, STEM),
    )


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = config.get(name)
    return table if isinstance(table, Mapping) else {}


def _by_name(table: Mapping[str, Any], names: Mapping[str, str | None]) -> dict[str, Any]:
    return {
        name: table[release_name]
        for name, release_name in names.items()
        if release_name is not None and release_name in table
    }
