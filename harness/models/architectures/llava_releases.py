"""Releases in LLaVA's format, loaded under their tensor names, without their code.

Their config.json belongs to remote code and does not describe the tower: what it omits comes from the model's file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from espalier.harness.errors import FOREIGN, UserError
from espalier.harness.models.loader import config_of, require_settings
from espalier.harness.models.towers.onevision_views import OnevisionViewsAdapter
from espalier.harness.specs.run_spec import ModelSpec

#: From patterns of the releases' tensor names to the library's; a name changes at most once.
RENAMES = {
    r"^model\.(embed_tokens|layers|norm)\.": r"model.language_model.\1.",
    r"^model\.vision_tower\.vision_tower\.vision_model\.": "model.vision_tower.",
    r"^model\.mm_projector\.0\.": "model.multi_modal_projector.linear_1.",
    r"^model\.mm_projector\.2\.": "model.multi_modal_projector.linear_2.",
}

_LAYER = r"^model\.transformer\.blocks\.(\d+)\."
#: LLaDA's names of the parts of a block, and Llama's.
_BLOCK = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}

#: The same for releases with LLaDA.
LLADA_RENAMES = {
    **{
        rf"{_LAYER}{old}\.": rf"model.language_model.layers.\1.{new}."
        for old, new in _BLOCK.items()
    },
    r"^model\.transformer\.wte\.": "model.language_model.embed_tokens.",
    r"^model\.transformer\.ln_f\.": "model.language_model.norm.",
    r"^model\.transformer\.ff_out\.": "lm_head.",
    **RENAMES,
}

#: Sizes of the text stack: the library's keys, and the equivalent keys of config.json; the first that exists is used.
_SIZES = {
    "vocab_size": ("embedding_size", "vocab_size"),
    "hidden_size": ("d_model", "hidden_size"),
    "intermediate_size": ("mlp_hidden_size", "intermediate_size"),
    "num_hidden_layers": ("n_layers", "num_hidden_layers"),
    "num_attention_heads": ("n_heads", "num_attention_heads"),
    "num_key_value_heads": ("n_kv_heads", "num_key_value_heads"),
    "max_position_embeddings": ("max_sequence_length", "max_position_embeddings"),
    "rms_norm_eps": ("rms_norm_eps",),
}

#: Values required in config.json, if stated, for the library's modules to compute the same.
FIXED: Mapping[str, Any] = {
    "rope_scaling": None,
    "use_sliding_window": False,
    "mm_projector_type": "mlp2x_gelu",
    "mm_vision_select_layer": -2,
    "mm_patch_merge_type": "spatial_unpad",
    "mm_spatial_pool_stride": 2,
}

#: The same for releases with LLaDA.
LLADA_FIXED: Mapping[str, Any] = {
    **FIXED,
    "rope": True,
    "alibi": False,
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "hidden_act": "silu",
    "scale_logits": False,
    "input_emb_norm": False,
    "attention_layer_norm": False,
    "mm_spatial_pool_mode": "bilinear",
}

#: A range of planes, from (columns x rows) tiles to (columns x rows).
_RANGE = re.compile(r"\((\d+)x(\d+)\).*\((\d+)x(\d+)\)")


def text_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of the text stack in config.json under the library's keys, without those it omits."""
    sizes: dict[str, Any] = {}
    for name, release_name in _SIZES.items():
        stated = [config[key] for key in release_name if config.get(key) is not None]
        if stated:
            sizes[name] = stated[0]
    if config.get("rope_theta") is not None:
        sizes["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": float(config["rope_theta"]),
        }
    return sizes


def planes(stated: str | Sequence[Sequence[int]], side: int) -> list[list[int]]:
    """Return the valid sizes of the plane of crops, in pixels, height before width.

    The order is kept, because the first of two equally good planes is used.

    Args:
        stated: `image_grid_pinpoints` of config.json, width before height: a list, its text, or a range of tile counts
            such as `(1x1),...,(6x6)`.
        side: pixels along the edge of a tile.

    Raises:
        UserError: another format.
    """
    if isinstance(stated, str) and (ends := _RANGE.search(stated)):
        left, top, right, bottom = map(int, ends.groups())
        return [
            [rows * side, columns * side]
            for columns in range(left, right + 1)
            for rows in range(top, bottom + 1)
        ]
    try:
        sizes = (
            json.loads(stated.replace("(", "[").replace(")", "]"))
            if isinstance(stated, str)
            else stated
        )
        return [[int(height), int(width)] for width, height in sizes]
    except FOREIGN as error:
        raise UserError(
            f"config.json: image_grid_pinpoints={stated!r} cannot be loaded; valid: a list of sizes in pixels"
        ) from error


class ReleasedAdapter(OnevisionViewsAdapter):
    """A family with LLaVA-OneVision's vision side that is loaded from its release."""

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Return a processor with the checkpoint's tokenizer; its image settings are in remote code."""
        return cls.built_processor(cls.checkpoint_config(spec), cls.read_tokenizer(spec))

    @classmethod
    def checkpoint_config(cls, spec: ModelSpec) -> Any:
        """Return the library's configuration with the values of the checkpoint's config.json.

        Values that it omits come from the model's config file.

        Raises:
            UserError: config.json states a different computation.
        """
        release = config_of(spec)
        require_settings(release, cls.data.fixed)
        text = {**spec.architecture.get("text", {}), **text_sizes(release)}
        stated = replace(spec, architecture={**spec.architecture, "text": text})
        config = cls.configuration(stated, cls.read_tokenizer(spec))
        if "image_grid_pinpoints" in release:
            config.image_grid_pinpoints = planes(
                release["image_grid_pinpoints"], config.vision_config.image_size
            )
        return config

    @classmethod
    def read_tokenizer(cls, spec: ModelSpec) -> Any:
        """Return the checkpoint's tokenizer with the two placeholders, which the originals write as negative ids.

        Raises:
            UserError: the ids exceed the rows of the embedding.
        """
        tokenizer = cls.data.tokenizer(spec)
        tokenizer.add_tokens(["<image>", "<video>"], special_tokens=True)
        if spec.architecture and len(tokenizer) > spec.facts.vocabulary:
            raise UserError(
                f"model={spec.name}: the tokenizer has {len(tokenizer)} tokens with <image> and <video>, the embedding "
                f"{spec.facts.vocabulary} rows (model.facts.vocabulary)"
            )
        return tokenizer
