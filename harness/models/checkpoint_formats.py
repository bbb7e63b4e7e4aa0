"""Checkpoints in a format that is not loaded here: refused by their configuration, with the way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from espalier.harness.errors import UserError

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec

#: Classes of the releases' own code, each with the place of the same weights in transformers' format.
ORIGINAL: Mapping[str, str] = {
    "LlavaLlamaForCausalLM": "llava-hf/ on the hub (llava-1.5-7b-hf, llava-v1.6-vicuna-7b-hf)",
    "LlavaMistralForCausalLM": "llava-hf/ on the hub (llava-v1.6-mistral-7b-hf)",
    "LlavaQwenForCausalLM": "llava-hf/ on the hub (llava-onevision-qwen2-7b-ov-hf)",
    "InternVLChatModel": "OpenGVLab/ on the hub, with -hf at the end of the name",
}


def check_format(spec: ModelSpec, source: str, config: Mapping[str, Any]) -> None:
    """Refuse quantised weights, and releases that only their own code reads; nothing but config.json is needed.

    Args:
        spec: the model's part of the run.
        source: the checkpoint, as a line names it.
        config: what its config.json holds.

    Raises:
        UserError: one line with the repository or the command that has the weights in a format that loads.
    """
    quantised = config.get("quantization_config")
    if quantised is None and isinstance(config.get("text_config"), Mapping):
        quantised = config["text_config"].get("quantization_config")
    if quantised is not None:
        quantisation = (
            quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        )
        raise UserError(
            f"model={spec.name}: checkpoint {source!r} has quantised weights (quantization_config: {quantisation}), "
            "which are not supported; valid: the release in float16 or bfloat16"
        )
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if name in ORIGINAL:
            # A model's file names a repository of transformers' format, or the command that makes it.
            source_hint = spec.conversion or (
                f"{spec.hub}, the same weights" if spec.hub else ORIGINAL[name]
            )
            raise UserError(
                f"model={spec.name}: checkpoint {source!r} is in the format of its first release "
                f"({config.get('model_type')}, {name}); valid: transformers' format, from {source_hint}"
            )
