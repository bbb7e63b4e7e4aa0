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

ADAPTERS = Registry("model.adapter")
ADAPTERS.add("llava", "espalier.harness.models.llava:LlavaAdapter")
ADAPTERS.add("llava_next", "espalier.harness.models.llava:LlavaNextAdapter")
ADAPTERS.add("llava_onevision", "espalier.harness.models.llava_onevision:LlavaOnevisionAdapter")
ADAPTERS.add(
    "llava_onevision1_5", "espalier.harness.models.llava_onevision1_5:LlavaOnevision15Adapter"
)
ADAPTERS.add("llava_video", "espalier.harness.models.llava_video:LlavaVideoAdapter")
ADAPTERS.add("qwen2_vl", "espalier.harness.models.qwen_vl:Qwen2VLAdapter")
ADAPTERS.add("qwen2_5_vl", "espalier.harness.models.qwen_vl:Qwen25VLAdapter")
ADAPTERS.add("qwen3_vl", "espalier.harness.models.qwen_vl:Qwen3VLAdapter")
ADAPTERS.add("qwen3_vl_moe", "espalier.harness.models.qwen_vl:Qwen3VLMoeAdapter")
ADAPTERS.add("glm4v", "espalier.harness.models.glm4v:Glm4vAdapter")
ADAPTERS.add("glm4v_moe", "espalier.harness.models.glm4v:Glm4vMoeAdapter")
ADAPTERS.add("qwen3_5", "espalier.harness.models.qwen_vl:Qwen35Adapter")
ADAPTERS.add("qwen3_5_moe", "espalier.harness.models.qwen_vl:Qwen35MoeAdapter")
ADAPTERS.add("internvl", "espalier.harness.models.internvl:InternVLAdapter")
ADAPTERS.add("smolvlm", "espalier.harness.models.smolvlm:SmolVLMAdapter")
ADAPTERS.add("gemma3", "espalier.harness.models.gemma3:Gemma3Adapter")
ADAPTERS.add("molmo2", "espalier.harness.models.molmo2:Molmo2Adapter")
ADAPTERS.add("deepseek_ocr", "espalier.harness.models.deepseek_ocr:DeepseekOcrAdapter")
ADAPTERS.add("deepseek_ocr2", "espalier.harness.models.deepseek_ocr:DeepseekOcr2Adapter")
ADAPTERS.add("paddleocr_vl", "espalier.harness.models.paddleocr_vl:PaddleOcrVLAdapter")
ADAPTERS.add("hunyuan_ocr", "espalier.harness.models.hunyuan_ocr:HunyuanOcrAdapter")
ADAPTERS.add("minicpm_v", "espalier.harness.models.minicpm_v:MiniCpmVAdapter")
ADAPTERS.add("diffusion_gemma", "espalier.harness.models.diffusion_gemma:DiffusionGemmaAdapter")
ADAPTERS.add("llada_v", "espalier.harness.models.llada_v:LladaVAdapter")
#: For classes that no other family has.
GENERIC = "generic"
ADAPTERS.add(GENERIC, "espalier.harness.models.generic:GenericAdapter")
ADAPTERS.add("lavida", "espalier.harness.models.lavida:LavidaAdapter")
ADAPTERS.add("lavida_dream", "espalier.harness.models.lavida:LavidaDreamAdapter")

#: The family of each `model_type` (`Adapter.types`): importing all families to find one takes seconds. A family that is
#: missing here is imported.
MODEL_TYPES: Mapping[str, str] = {
    **{
        name: name for name in ("internvl", "llava", "llava_next", "llava_onevision", "llava_video")
    },
    **{name: name for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")},
    **{
        name: name
        for name in ("qwen3_5", "qwen3_5_moe", "smolvlm", "gemma3", "molmo2", "glm4v", "glm4v_moe")
    },
    "glm46v": "glm4v",
    **{"paddleocr_vl": "paddleocr_vl", "hunyuan_vl": "hunyuan_ocr"},
    "deepseek_ocr2": "deepseek_ocr2",
    "llavaonevision1_5": "llava_onevision1_5",
    "minicpmv4_6": "minicpm_v",
    "diffusion_gemma": "diffusion_gemma",
    **dict.fromkeys(("deepseek_vl_v2", "unlimited_ocr"), "deepseek_ocr"),
    # One type for two families, and neither checkpoint describes its model completely.
    "llava_llada": "llada_v",
    "llava_dream": "lavida_dream",
}

#: Classes of the releases' code: the format of `espalier convert`, and the same weights in transformers' format.
ORIGINAL: Mapping[str, tuple[str, str]] = {
    "LlavaLlamaForCausalLM": (
        "llava",
        "llava-hf/ on the hub (llava-1.5-7b-hf, llava-v1.6-vicuna-7b-hf)",
    ),
    "LlavaMistralForCausalLM": ("llava", "llava-hf/ on the hub (llava-v1.6-mistral-7b-hf)"),
    "LlavaQwenForCausalLM": (
        "llava_onevision",
        "llava-hf/ on the hub (llava-onevision-qwen2-7b-ov-hf)",
    ),
    "InternVLChatModel": ("internvl", "OpenGVLab/ on the hub, with -hf at the end of the name"),
}

#: What LLaVA-Video's config.json has and LLaVA-OneVision's has not.
_ROW_NEWLINES = ("mm_newline_position", "grid")


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
            if _ROW_NEWLINES in config.items() and kind == "llava_onevision":
                kind, sibling = "llava_video", ""
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
    if model_type not in families:
        for family in set(ADAPTERS.names()) - {*families.values(), "lavida", GENERIC}:
            families |= dict.fromkeys(ADAPTERS.load(family).types(), family)
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
