"""The table of model families, and the family of a checkpoint by its config.json.

No family is imported before its use.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from espalier.harness.errors import UserError, unknown_name
from espalier.harness.models.quantisation import check_quantisation
from espalier.harness.specs.plugins.installed import adapters
from espalier.harness.specs.registry import Registry

#: For classes that no other family has.
GENERIC = "generic"

#: The class of each family, below harness/models, and the `model_type` of the checkpoints that it loads: importing all
#: families to find one takes seconds (`Adapter.types` of a family has them too).
FAMILIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "llava": ("llava:LlavaAdapter", ("llava",)),
    "llava_next": ("llava_next:LlavaNextAdapter", ("llava_next",)),
    "llava_onevision": ("llava_onevision:LlavaOnevisionAdapter", ("llava_onevision",)),
    "llava_onevision1_5": (
        "llava_onevision1_5:LlavaOnevision15Adapter",
        ("llavaonevision1_5",),
    ),
    "llava_video": ("llava_video:LlavaVideoAdapter", ("llava_video", "llava_qwen")),
    "qwen2_vl": ("qwen2_vl:Qwen2VLAdapter", ("qwen2_vl",)),
    "qwen2_5_vl": ("qwen2_5_vl:Qwen25VLAdapter", ("qwen2_5_vl",)),
    "qwen3_vl": ("qwen3_vl:Qwen3VLAdapter", ("qwen3_vl",)),
    "qwen3_vl_moe": ("qwen3_vl:Qwen3VLMoeAdapter", ("qwen3_vl_moe",)),
    "glm4v": ("glm4v:Glm4vAdapter", ("glm4v", "glm46v")),
    "glm4v_moe": ("glm4v:Glm4vMoeAdapter", ("glm4v_moe",)),
    "qwen3_5": ("qwen3_5:Qwen35Adapter", ("qwen3_5",)),
    "qwen3_5_moe": ("qwen3_5:Qwen35MoeAdapter", ("qwen3_5_moe",)),
    "internvl": ("internvl:InternVLAdapter", ("internvl",)),
    "smolvlm": ("smolvlm:SmolVLMAdapter", ("smolvlm",)),
    "gemma3": ("gemma3:Gemma3Adapter", ("gemma3",)),
    "molmo2": ("molmo2:Molmo2Adapter", ("molmo2",)),
    # Checkpoints of both releases have one type, and neither describes its model completely.
    "deepseek_ocr": ("deepseek_ocr:DeepseekOcrAdapter", ("deepseek_vl_v2", "unlimited_ocr")),
    "deepseek_ocr2": ("deepseek_ocr2:DeepseekOcr2Adapter", ("deepseek_ocr2",)),
    "paddleocr_vl": ("paddleocr_vl:PaddleOcrVLAdapter", ("paddleocr_vl",)),
    "hunyuan_ocr": ("hunyuan_ocr:HunyuanOcrAdapter", ("hunyuan_vl",)),
    "minicpm_v": ("minicpm_v:MiniCpmVAdapter", ("minicpmv4_6",)),
    "diffusion_gemma": ("diffusion_gemma:DiffusionGemmaAdapter", ("diffusion_gemma",)),
    # One type for two families, and neither checkpoint describes its model completely.
    "llada_v": ("llada_v:LladaVAdapter", ("llava_llada",)),
    "lavida": ("lavida:LavidaAdapter", ()),
    "lavida_dream": ("lavida:LavidaDreamAdapter", ("llava_dream",)),
    GENERIC: ("generic:GenericAdapter", ()),
}

ADAPTERS = Registry("model.adapter")
for _name, (_place, _types) in FAMILIES.items():
    ADAPTERS.add(_name, f"espalier.harness.models.{_place}")

MODEL_TYPES: dict[str, str] = {
    model_type: name for name, (_, types) in FAMILIES.items() for model_type in types
}

#: Classes of the releases' code: the format of `espalier convert`, and the same weights in transformers' format.
ORIGINAL: Mapping[str, tuple[str, str]] = {
    "LlavaLlamaForCausalLM": (
        "llava",
        "llava-hf/ on the hub (llava-1.5-7b-hf, llava-v1.6-vicuna-7b-hf)",
    ),
    "LlavaMistralForCausalLM": ("llava", "llava-hf/ on the hub (llava-v1.6-mistral-7b-hf)"),
    "InternVLChatModel": ("internvl", "OpenGVLab/ on the hub, with -hf at the end of the name"),
}


def check_format(
    name: str, source: str, config: Mapping[str, Any], sibling: str | None = None
) -> None:
    """Refuse quantised weights that cannot be read here, and releases that only their own code reads, by config.json.

    Args:
        name: of the model in the error line.
        source: of the checkpoint in the error line.
        config: content of its config.json.
        sibling: the repository with the same weights in transformers' format; "": there is none; None: by the class.

    Raises:
        UserError: one line with the conversion command and the repository, for weights in a supported format.
    """
    check_quantisation(name, source, config)
    names = config.get("architectures")
    for architecture in names if isinstance(names, list) else ():
        if architecture in ORIGINAL:
            kind, repository = ORIGINAL[architecture]
            place = quote(source) if Path(source).is_dir() else "<release>"
            command = (
                f"python -m espalier convert {kind} {place} <output>, then model.path=<output>"
            )
            hub = repository if sibling is None else sibling
            raise UserError(
                f"model={name}: checkpoint {source!r} is in the format of its first release "
                f"({config.get('model_type')}, {architecture}); valid: {command}"
                + (f"; or transformers' format, from {hub}" if hub else "")
            )


def family_of(model_type: str | None, key: str = "model_type") -> str:
    """Return the family of a configuration's `model_type`, of the repository or of an installed plug-in.

    `key` is the start of the error line.

    Raises:
        UserError: an unknown type; the line lists the known ones.
    """
    families = dict(MODEL_TYPES)
    passed_over = []
    for family in adapters() if model_type not in families else ():
        try:
            families = dict.fromkeys(own_family(family).types(), family) | families
        except UserError as error:  # another plug-in may have the type
            passed_over.append(str(error))
    if model_type not in families and model_type in ADAPTERS.load(GENERIC).types():
        return GENERIC
    if model_type is None or model_type not in families:
        unknown = unknown_name(key, str(model_type), families)
        generic = "any image-text-to-text class of transformers"
        raise UserError("; ".join([f"{unknown}, or {generic}", *passed_over]))
    return families[model_type]


def own_family(name: str) -> Any:
    """Return the class of a user's family.

    Raises:
        UserError: it cannot be imported, or is no family.
    """
    # Imports torch, which a family of the user imports as well.
    from espalier.harness.engine.model_parts import ModelParts

    family = ADAPTERS.load(name)
    if not issubclass(family, ModelParts):
        raise UserError(
            f"model.adapter={name!r} is no model family; valid: a subclass of espalier.harness.models.adapter.Adapter"
        )
    return family
