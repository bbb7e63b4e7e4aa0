"""LaViDa, with LLaDA or Dream, and LLaDA-V: tiny instances saved as their releases are, since they load as released.

They denoise their answers, so they stand apart from the families that say one token after another.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from espalier.harness.cost.facts import DiffusionFacts, StackFacts
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.lavida import DREAM_SPECIAL
from espalier.harness.models.llada_v import SPECIAL
from espalier.harness.models.random_weights import byte_tokenizer
from espalier.harness.specs.run_spec import ModelSpec, VideoSpec
from tests.families.onevision import FRAMES, video, watch
from tests.tiny import (
    DEPTH,
    SHAPES,
    VOCABULARY,
    Family,
    chat,
    load_tiny,
    picture,
    random_model,
    sharpen,
    tiny_spec,
)

FAMILIES: dict[str, Family] = {}

TEXT = StackFacts(DEPTH, 32, 48, 4, 4, 8, gated=True, causal=False)
THETA = 500000.0
#: Pixels along an edge of a tile, and planes of crops, height before width. LaViDa's patches are odd in number, as 27.
SIDES = {"llada_v": 28, "lavida": 35, "lavida_dream": 35}
PLANES = {
    "llada_v": [[rows * 28, columns * 28] for columns in (1, 2, 3) for rows in (1, 2, 3)],
    "lavida": [[70, 35], [35, 70], [70, 70], [35, 105], [105, 35]],
    "lavida_dream": [[70, 35], [35, 70], [70, 70], [35, 105], [105, 35]],
}
RATIOS = {"llada_v": "anyres_max_2", "lavida": "anyres_max_9", "lavida_dream": "anyres_max_9"}

#: The special tokens of a release's tokenizer, which knows no placeholders; the first is padding and end at once.
_TOKENS = [token for token in SPECIAL if token not in ("<image>", "<video>")]
_KNOWN = list(dict.fromkeys(_TOKENS))
#: Those of Dream's, which follow the words.
_DREAM = dict(
    enumerate(
        dict.fromkeys(token for token in DREAM_SPECIAL if token not in ("<image>", "<video>")), 256
    )
)


def _spec(name: str) -> ModelSpec:
    side = SIDES[name]
    spec = tiny_spec(
        name,
        text=replace(TEXT, kv_heads=2) if name == "lavida_dream" else TEXT,
        class_attention="mean",
        architecture={
            "text": {
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1.0e-5,
                "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
            },
            "vision": {"image_size": side, "patch_size": 7, "vision_use_head": False},
            "model": {
                "image_grid_pinpoints": PLANES[name],
                "vision_aspect_ratio": RATIOS[name],
                "vision_feature_layer": -1,
                "vision_feature_select_strategy": "full",
            },
        },
        video=VideoSpec(frames=FRAMES),
    )
    if name == "lavida_dream":
        ids = {token: number for number, token in _DREAM.items()}
        ends = (ids["<|endoftext|>"], ids["<|im_end|>"])
        denoises = DiffusionFacts(ids["<|mask|>"], ends, prefix_cache=True, shifted=True)
    else:
        mask, *ends = map(_KNOWN.index, ("<|mdm_mask|>", "<|endoftext|>", "<|eot_id|>"))
        denoises = DiffusionFacts(mask, tuple(ends), prefix_cache=name == "lavida")
    return replace(spec, facts=replace(spec.facts, diffusion=denoises))


#: Three rows that need left padding: pictures of other shapes, two in one row, a small one.
_CHATS = (*SHAPES, chat("w0", picture(4, 20, 31)))

DENOISING = {
    "llada_v": Family(_spec("llada_v"), _CHATS),
    "llada_v_video": Family(_spec("llada_v"), (watch("w1", video(0)), watch("w2 w3", video(1)))),
    "lavida": Family(_spec("lavida"), _CHATS),
    "lavida_dream": Family(_spec("lavida_dream"), _CHATS),
    "llada_v_several": Family(
        replace(_spec("llada_v"), processor={"several_pictures": "evaluation"}), _CHATS
    ),
    "lavida_several": Family(
        replace(_spec("lavida"), processor={"several_pictures": "evaluation"}), _CHATS
    ),
    "lavida_dream_several": Family(
        replace(_spec("lavida_dream"), processor={"several_pictures": "evaluation"}), _CHATS
    ),
    "lavida_video": Family(_spec("lavida"), (watch("w1", video(0)), watch("w2 w3", video(1)))),
    "lavida_dream_video": Family(
        _spec("lavida_dream"), (watch("w1", video(0)), watch("w2 w3", video(1)))
    ),
}

#: Inside of a text layer: the library's names and LLaDA's.
_LLADA = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


def released(name: str, llada: bool) -> str:
    """A tensor's name in a release: LaViDa's has LLaDA's own names, LLaDA-V's and Dream's those of Llama."""
    parts = name.removesuffix(".weight").split(".")
    if name.startswith("model.language_model.layers."):
        inside = ".".join(parts[4:])
        if llada:
            return f"model.transformer.blocks.{parts[3]}.{_LLADA[inside]}.weight"
        return f"model.layers.{parts[3]}.{inside}{'' if inside.endswith('bias') else '.weight'}"
    if name.startswith("model.vision_tower."):
        return f"model.vision_tower.vision_tower.vision_model.{name.removeprefix('model.vision_tower.')}"
    for part, number in (("linear_1", 0), ("linear_2", 2)):
        if name.startswith(f"model.multi_modal_projector.{part}."):
            return f"model.mm_projector.{number}.{parts[-1] if parts[-1] == 'bias' else 'weight'}"
    if name == "model.image_newline":
        return name
    names = {
        "model.language_model.embed_tokens.weight": ("model.embed_tokens", "model.transformer.wte"),
        "model.language_model.norm.weight": ("model.norm", "model.transformer.ln_f"),
        "lm_head.weight": ("lm_head", "model.transformer.ff_out"),
    }
    return f"{names[name][llada]}.weight"


def config_json(name: str) -> dict[str, Any]:
    """What config.json of a release states."""
    if name == "lavida":
        return {
            "model_type": "llava_llada",
            "d_model": 32,
            "mlp_hidden_size": 48,
            "n_layers": DEPTH,
            "n_heads": 4,
            "n_kv_heads": 4,
            "vocab_size": VOCABULARY,
            "embedding_size": VOCABULARY,
            "max_sequence_length": 2048,
            "rope": True,
            "rope_theta": THETA,
            "rms_norm_eps": 1e-5,
            "layer_norm_type": "rms",
            "activation_type": "silu",
            "mm_projector_type": "mlp2x_gelu",
            "mm_vision_select_layer": -2,
            "mm_patch_merge_type": "spatial_unpad",
            "image_aspect_ratio": "anyres",
            "image_grid_pinpoints": "[(35, 70), (70, 35), (70, 70), (105, 35), (35, 105)]",
        }
    if name == "lavida_dream":
        return {
            **config_json("llada_v"),
            "model_type": "llava_dream",
            "num_key_value_heads": 2,
            "use_sliding_window": False,
            "mask_token_id": DENOISING[name].spec.facts.diffusion.mask_id,
            "image_aspect_ratio": "anyres",
            "image_grid_pinpoints": "[(35, 70), (70, 35), (70, 70), (105, 35), (35, 105)]",
        }
    return {
        "model_type": "llava_llada",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rope_theta": THETA,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_layer": -2,
        "mm_patch_merge_type": "spatial_unpad",
        "image_aspect_ratio": "anyres_max_2",
        "image_grid_pinpoints": "(1x1),...,(3x3)",
    }


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="espalier-llada-")


@cache
def tensors_of(name: str) -> dict[str, Tensor]:
    """The tensors of a release by its own names."""
    model = random_model(DENOISING[name].spec)
    sharpen(model)
    return {released(key, name == "lavida"): value for key, value in model.state_dict().items()}


@cache
def saved_release(name: str) -> Path:
    """Write a release to disk: tensors, config.json and tokenizer without placeholders, and nothing of the library."""
    folder = Path(_folder().name) / name
    folder.mkdir()
    tensors = {key: value.contiguous() for key, value in tensors_of(name).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_json(name)))
    if name == "lavida_dream":
        _save_dream_tokenizer(folder)
    else:
        byte_tokenizer(_TOKENS).save_pretrained(folder)
    return folder


def _save_dream_tokenizer(folder: Path) -> None:
    """Write Dream's files: words, merges and added tokens, under a class that its own code defines."""
    letters = sorted(ByteLevel.alphabet())
    (folder / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(letters)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    added = {
        str(number): {"content": token, "special": True, "normalized": False}
        for number, token in _DREAM.items()
    }
    config = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": added,
        "bos_token": "<|beginoftext|>",
        "mask_token": "<|mask|>",
        **dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<|endoftext|>"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@cache
def adapter_of(name: str, dtype: str = "float64", attention: str = "sdpa") -> Adapter:
    """The adapter of a tiny release, loaded as a real one is."""
    spec = DENOISING[name].spec
    return load_tiny(spec, saved_release(spec.adapter), dtype, attention)
