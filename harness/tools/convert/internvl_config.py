"""The library's configuration of InternVL from a release's config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import InternVLConfig

from espalier.harness.errors import UserError

#: The release's text stacks and the library's.
_STACKS = {"internlm2": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3"}

#: How each may stretch its rotary table, and its name in the library.
_ROPES = {
    "internlm2": {"dynamic": "dynamic"},
    "qwen2": {"dynamic": "dynamic"},
    "qwen3": {},
    "phi3": {"su": "longrope", "longrope": "longrope"},
}

#: Keys of the text stack with the same names in config.json.
_TEXT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    *("rms_norm_eps", "hidden_act", "bos_token_id", "eos_token_id"),
)

#: Of the tower: the release's names and the library's.
_VISION = {
    **{name: name for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
    **{name: name for name in ("num_attention_heads", "image_size", "patch_size", "norm_type")},
    **{name: name for name in ("layer_norm_eps", "hidden_act")},
    "qkv_bias": "attention_bias",
    "qk_normalization": "use_qk_norm",
}

#: Settings that a release must have for the library's model and processor to give the same results.
_FIXED = {
    "model_type": "internvl_chat",
    "ps_version": "v2",
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "use_thumbnail": True,
}


def configuration(release: Mapping[str, Any], image_token: int, own_head: bool) -> Any:
    """Return the model's configuration.

    Args:
        release: the release's config.json.
        image_token: id of the placeholder of one visual token.
        own_head: whether the release has an output head apart from the embedding.

    Raises:
        UserError: it is not a release of InternVL, or one that the library's model cannot be.
    """
    for key, valid in _FIXED.items():
        if release.get(key) != valid:
            raise UserError(
                f"config.json: {key}={release.get(key)!r} cannot be converted; valid: {valid!r}"
            )
    vision = _take(release, "vision_config", _VISION)
    size = vision["image_size"]
    if release.get("force_image_size", size) != size:
        raise UserError(
            f"config.json: force_image_size={release['force_image_size']!r} cannot be converted; valid: {size}"
        )
    text = _text(release)
    if not (own_head or release["llm_config"].get("tie_word_embeddings")):
        raise UserError("the release lacks the output head of the text stack")
    side = size // vision["patch_size"]
    try:
        return InternVLConfig(
            vision_config={_VISION[key]: value for key, value in vision.items()},
            text_config={**text, "tie_word_embeddings": not own_head},
            image_token_id=image_token,
            image_seq_length=int(side * release["downsample_ratio"]) ** 2,
            downsample_ratio=release["downsample_ratio"],
            vision_feature_layer=release.get("select_layer", -1),
            tie_word_embeddings=not own_head,
        )
    except (ValueError, StrictDataclassError) as error:
        raise UserError(
            f"config.json cannot be converted ({' '.join(str(error).split())})"
        ) from error


def _take(
    release: Mapping[str, Any], block: str, keys: Sequence[str] | Mapping[str, str]
) -> dict[str, Any]:
    """Return the values of `keys` in a block of config.json."""
    section = release.get(block)
    if not isinstance(section, dict):
        raise UserError(f"this is not a release of InternVL: config.json has no {block!r}")
    lacking = [key for key in keys if key not in section]
    if lacking:
        raise UserError(f"config.json: {block} has no {lacking[0]!r}")
    return {key: section[key] for key in keys}


def _text(release: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text stack's configuration in the library's words."""
    text = _take(release, "llm_config", (*_TEXT, "model_type", "rope_theta"))
    section = release["llm_config"]
    kind, theta = text.pop("model_type"), float(text.pop("rope_theta"))
    if kind not in _STACKS:
        raise UserError(
            f"config.json: llm_config.model_type={kind!r} cannot be converted; valid: {', '.join(_STACKS)}"
        )
    limit = text["max_position_embeddings"]
    if section.get("use_sliding_window") or (
        kind == "phi3" and (section.get("sliding_window") or limit) < limit
    ):
        raise UserError(
            "config.json: llm_config with a sliding window cannot be converted; valid: full attention"
        )
    if kind == "qwen3":
        text |= _take(release, "llm_config", ("head_dim", "attention_bias"))
    text |= {"model_type": _STACKS[kind], "pad_token_id": section.get("pad_token_id")}
    scaling = dict(section.get("rope_scaling") or {})
    names = {scaling.pop(key, None) for key in ("type", "rope_type")} - {None}
    name = min(names, default=None)
    if name is not None and name not in _ROPES[kind]:
        raise UserError(
            f"config.json: llm_config.rope_scaling of type {name!r} cannot be converted; "
            f"valid: {', '.join(('none', *_ROPES[kind]))}"
        )
    if kind == "phi3":
        text["original_max_position_embeddings"] = section.get(
            "original_max_position_embeddings", limit
        )
    rope = "default" if name is None else _ROPES[kind][name]
    return {**text, "rope_parameters": {"rope_type": rope, "rope_theta": theta, **scaling}}
