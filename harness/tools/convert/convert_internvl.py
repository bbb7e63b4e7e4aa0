"""Convert an original release of InternVL2, 2.5, 3 or 3.5 (internvl_chat) to a checkpoint that the project loads."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    GenerationConfig,
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)
from transformers.utils.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from espalier.harness.errors import FOREIGN, UserError, foreign
from espalier.harness.models.conversations import NUMBERED, ChatFrame, uniform_frame
from espalier.harness.models.conversations import roles as by_role
from espalier.harness.models.internvl import TOKENS, frames_like
from espalier.harness.models.loader import pretrained, require_settings
from espalier.harness.tools.convert.checkpoint_writer import (
    Rename,
    Say,
    check_tokens,
    command_line,
    open_release,
    split_rows,
    write_checkpoint,
)
from espalier.harness.tools.convert.sentencepiece_tokens import (
    from_pieces,
    read_settings,
    wrapped,
)

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
    require_settings({**dict.fromkeys(_FIXED), **release}, _FIXED, "converted")  # none is absent
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


_HOLDER = "{system_message}"


def read_prompt(file: Path, name: str) -> ChatFrame:
    """Return the chat format `name` of a conversation.py.

    Raises:
        UserError: the file is not there or does not parse, or describes the format in another way.
    """
    with foreign(f"{str(file)!r} names no chat format", "the original file"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
    formats = [_keywords(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    template = next((entry for entry in formats if entry.get("name") == name), None)
    if template is None:
        raise UserError(f"{file.name} of the release describes no chat format {name!r}")
    head, roles, end = template.get("system_template"), template.get("roles"), template.get("sep")
    if not (
        template.get("sep_style") == "MPT"
        and isinstance(head, str)
        and head.endswith(_HOLDER)
        and isinstance(roles, tuple)
        and len(roles) == 2
        and isinstance(end, str)
    ):
        raise UserError(
            f"chat format {name!r} of {file.name} cannot be converted; valid: sep_style MPT, two roles"
        )
    heads = by_role(head.removesuffix(_HOLDER), *roles)
    return uniform_frame(str(template.get("system_message", "")), heads, end)


def _keywords(call: ast.Call) -> dict[str, object]:
    """Return the keyword arguments of a call that are literals, and the last word of those that are names."""
    keywords: dict[str, object] = {}
    for keyword in call.keywords:
        if isinstance(keyword.value, ast.Attribute):
            keywords[str(keyword.arg)] = keyword.value.attr
            continue
        with suppress(*FOREIGN):
            keywords[str(keyword.arg)] = ast.literal_eval(keyword.value)
    return keywords


#: What has to be one token in a chat format.
_MARKS = re.compile(r"<\|\w+\|>")

#: Classes of sentencepiece tokenizers.
_PIECES = ("InternLM2Tokenizer", "LlamaTokenizer")


def build_tokenizer(source: Path, prompt: ChatFrame) -> tuple[PreTrainedTokenizerFast, str]:
    """Return the tokenizer of a release, and the chat template.

    Raises:
        UserError: a file is not there or of another kind; the tokenizer lacks a token that a chat needs, or changes
            ids.
    """
    settings, lead = read_settings(source), ""
    kind = str(settings.config.get("tokenizer_class")).removesuffix("Fast")
    if kind in _PIECES:
        # Llama's tokenizer once put a space after every special token; InternLM2's still does.
        once = kind == "LlamaTokenizer" and settings.config.get("legacy") is False
        backend, lead = from_pieces(source, settings, once, prompt.render(""))
    elif kind == "Qwen2Tokenizer":
        with foreign(f"{str(source)!r}: no usable vocabulary", "the original files"):
            backend = pretrained(Qwen2Tokenizer, source).backend_tokenizer
    else:
        raise UserError(
            f"tokenizer_config.json: tokenizer_class={kind!r} cannot be converted; "
            f"valid: {', '.join(_PIECES)}, Qwen2Tokenizer"
        )
    for number, token in settings.added.items():
        if backend.token_to_id(token.content) != number:
            raise UserError(
                f"token {token.content!r} has id {number} in the release, "
                f"{backend.token_to_id(token.content)} after conversion"
            )
    end = prompt.ends["user"].strip()
    media = [TOKENS[role] for role in TOKENS if role != "video_token"]
    for mark in (*media, end, *_MARKS.findall(prompt.render(""))):
        if backend.token_to_id(mark) is None:
            raise UserError(f"the tokenizer of the release has no token {mark!r}")
    named = {"eos_token": end, **settings.named}
    # The processor replaces the video token before a text is encoded: its id, the next free one, never reaches the
    # model.
    tokenizer = wrapped(backend, **{"pad_token": named["eos_token"], **named}, **TOKENS)
    return tokenizer, replace(prompt, lead=lead).template(NUMBERED)


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

    def rename(name: str, tensor: Tensor) -> dict[str, Tensor] | None:
        layer = _LAYER.fullmatch(name)
        if layer is None:
            return _swap(name, tensor, _PARTS)
        stack, number, suffix = layer.groups()
        if stack == "vision_model.encoder":
            place = f"model.vision_tower.encoder.layer.{number}."
            if suffix.startswith("attn.qkv."):
                kind = suffix.removeprefix("attn.qkv.")
                rows = {f"{place}attention.{letter}_proj.{kind}": width for letter in "qkv"}
                return split_rows(tensor, rows)
            return _swap(suffix, tensor, _VIT, place)
        place = f"model.language_model.layers.{number}."
        if suffix == "attention.wqkv.weight" and names is _INTERNLM2:
            # For each key head its query heads, the key and the value.
            widths = zip("qkv", (query, value, value), strict=True)
            rows = {f"{place}self_attn.{letter}_proj.weight": n for letter, n in widths}
            return split_rows(tensor, rows, groups=text.num_key_value_heads)
        return _swap(suffix, tensor, names, place)

    return rename


def _swap(
    name: str, tensor: Tensor, table: Mapping[str, str], place: str = ""
) -> dict[str, Tensor] | None:
    """Return a tensor under the name that a table of prefixes gives it after `place`."""
    for old, new in table.items():
        if name.startswith(old):
            return {place + new + name.removeprefix(old): tensor}
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
    tokenizer, template = build_tokenizer(source, prompt)
    # The placeholder of videos has no row.
    check_tokens(len(tokenizer) - 1, config.text_config.vocab_size)
    processor = build_processor(release.config, config, tokenizer, template)
    config.image_token_id = processor.image_token_id
    write_checkpoint(
        release,
        target,
        say,
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
    )


#: Runs the command line.
main = command_line("internvl", __doc__, convert, "/models/InternVL2-8B /models/internvl")
