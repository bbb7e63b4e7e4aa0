"""LLaDA-V: LLaVA-OneVision's vision side with SigLIP 2, in front of LLaDA, which denoises its answers.

LLaDA's blocks are Llama's, every token sees every other (`model.facts.diffusion`). The release is loaded under its own
tensor names, without its code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from transformers import LlavaOnevisionImageProcessorPil, PreTrainedTokenizerFast

from espalier.harness.errors import UserError
from espalier.harness.models.conversations import FLUSH, JOINS
from espalier.harness.models.llava_onevision import LlavaOnevisionAdapter, build_processor
from espalier.harness.models.loader import config_of, load_part
from espalier.harness.models.random_weights import text_config, vision_config

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec

_LAYER = r"^model\.transformer\.blocks\.(\d+)\."
_TEXT = "model.language_model."

#: Inside of a block: LLaDA's names and Llama's.
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

#: From patterns of the releases' names to the library's; a name changes at most once.
RENAMES = {
    **{rf"{_LAYER}{old}\.": rf"{_TEXT}layers.\1.{new}." for old, new in _BLOCK.items()},
    r"^model\.transformer\.wte\.": f"{_TEXT}embed_tokens.",
    r"^model\.transformer\.ln_f\.": f"{_TEXT}norm.",
    r"^model\.transformer\.ff_out\.": "lm_head.",
    r"^model\.(embed_tokens|layers|norm)\.": rf"{_TEXT}\1.",
    r"^model\.vision_tower\.vision_tower\.vision_model\.": "model.vision_tower.",
    r"^model\.mm_projector\.0\.": "model.multi_modal_projector.linear_1.",
    r"^model\.mm_projector\.2\.": "model.multi_modal_projector.linear_2.",
}

#: Of the text stack: the library's keys, and those of config.json that state the same, the first that is there.
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

#: What config.json must say, where it says it, for the library's modules to compute the same.
_FIXED: Mapping[str, Any] = {
    "rope": True,
    "alibi": False,
    "rope_scaling": None,
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "hidden_act": "silu",
    "scale_logits": False,
    "input_emb_norm": False,
    "attention_layer_norm": False,
    "mm_projector_type": "mlp2x_gelu",
    "mm_vision_select_layer": -2,
    "mm_patch_merge_type": "spatial_unpad",
    "mm_spatial_pool_mode": "bilinear",
    "mm_spatial_pool_stride": 2,
}

#: All planes from one number of tiles, columns by rows, to another.
_RANGE = re.compile(r"\((\d+)x(\d+)\).*\((\d+)x(\d+)\)")


def check_release(config: Mapping[str, Any]) -> None:
    """Refuse a release that is computed in another way.

    Raises:
        UserError: what config.json states differs; the line names the first key.
    """
    for key, valid in _FIXED.items():
        if config.get(key, valid) != valid:
            raise UserError(
                f"config.json: {key}={config[key]!r} cannot be loaded; valid: {valid!r}"
            )


def text_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json states of the text stack, in the library's words; nothing where it is silent."""
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
    """Return the sizes of the planes that crops may form, in pixels, height before width.

    The order stays: of two planes that fit equally well the first is taken.

    Args:
        stated: `image_grid_pinpoints` of config.json, width before height: a list, the text of one, or two numbers of
            tiles with all between them, as in `(1x1),...,(6x6)`.
        side: pixels along a tile's edge.

    Raises:
        UserError: it is none of these.
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
    except (ValueError, TypeError) as error:
        raise UserError(
            f"config.json: image_grid_pinpoints={stated!r} cannot be loaded; valid: a list of sizes in pixels"
        ) from error


#: LLaDA's: padding and end, beginning, placeholders, and what prompts and answers hold beside words.
SPECIAL = (
    *("<|endoftext|>", "<|startoftext|>", "<|endoftext|>", "<image>", "<video>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|mdm_mask|>"),
)


class LladaVAdapter(LlavaOnevisionAdapter):
    """`LlavaOnevisionForConditionalGeneration` around Llama: one image is AnyRes, each of several one tile."""

    checkpoint_types = ("llava_llada",)
    #: The release's config.json belongs to remote code and does not describe the tower.
    self_described = False
    renames = RENAMES
    special = SPECIAL
    #: The release's evaluation asks for short answers without reasoning.
    conversation: ClassVar[str] = "llada_no_think"
    joins = {**JOINS, "flush": FLUSH}  # noqa: RUF012 - never written to

    @classmethod
    def load_processor(cls, spec: ModelSpec) -> Any:
        """Build it around the checkpoint's tokenizer; image settings are remote code there."""
        return cls.built_processor(cls.checkpoint_config(spec), _tokenizer(spec))

    @classmethod
    def new_processor(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """SigLIP's preprocessing, AnyRes for images."""
        return cls.built_processor(cls.configuration(spec, tokenizer), tokenizer)

    @classmethod
    def built_processor(cls, config: Any, tokenizer: Any) -> Any:
        """Return the processor that fits a configuration; it resizes images by PIL, as the releases do."""
        return build_processor(
            cls.processor_class, config, tokenizer, LlavaOnevisionImageProcessorPil
        )

    @classmethod
    def checkpoint_config(cls, spec: ModelSpec) -> Any:
        """Describe the model in the library's words, as far as the checkpoint's own config.json describes it.

        What that does not say comes from the config file.

        Raises:
            UserError: it says that something is computed in another way.
        """
        release = config_of(spec)
        check_release(release)
        config = cls._described(spec, _tokenizer(spec), text_sizes(release))
        if "image_grid_pinpoints" in release:
            config.image_grid_pinpoints = planes(
                release["image_grid_pinpoints"], config.vision_config.image_size
            )
        return config

    @classmethod
    def configuration(cls, spec: ModelSpec, tokenizer: Any) -> Any:
        """SigLIP, an MLP and Llama."""
        return cls._described(spec, tokenizer, {})

    @classmethod
    def _described(cls, spec: ModelSpec, tokenizer: Any, sizes: dict[str, Any]) -> Any:
        return cls.config_class(
            vision_config={
                "model_type": "siglip_vision_model",
                **vision_config(spec.facts.tower, spec),
            },
            text_config={"model_type": "llama", **text_config(spec, tokenizer), **sizes},
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
            video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
            **spec.architecture["model"],
        )

    def decode(self, ids: Tensor) -> list[str]:
        """Turn new tokens into answers, without one full stop at their end, as the release's evaluation does."""
        return [text.removesuffix(".").strip() for text in super().decode(ids)]


def _tokenizer(spec: ModelSpec) -> Any:
    """Load the checkpoint's tokenizer and give it the two placeholders, which the originals write as numbers below 0.

    Raises:
        UserError: their ids would lie behind the embedding's last row.
    """
    tokenizer = load_part(spec, PreTrainedTokenizerFast)
    tokenizer.add_tokens(["<image>", "<video>"], special_tokens=True)
    if len(tokenizer) > spec.facts.vocabulary:
        raise UserError(
            f"model={spec.name}: the tokenizer has {len(tokenizer)} tokens with <image> and <video>, the embedding "
            f"{spec.facts.vocabulary} rows (model.facts.vocabulary)"
        )
    return tokenizer
