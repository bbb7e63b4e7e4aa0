"""Quantised checkpoints: answers of the packed weights, and what a row records of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, LlavaForConditionalGeneration

import espalier
from espalier.harness.api.loaded_models import named_spec
from espalier.harness.cost.bounds import step_bytes
from espalier.harness.cost.budget import Budget
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.build_adapter import load_adapter, weight_bytes
from espalier.harness.models.quantisation import (
    MODULES,
    quantisation_of,
    quantised_packages,
    stored_bytes,
)
from espalier.harness.paths import located
from espalier.harness.runs.environment import placement
from espalier.methods.base import Method
from espalier.methods.d2pruner import D2Pruner
from espalier.methods.fastv import FastV
from espalier.methods.none import NoReduction
from tests.family_runs import Tiny, generated, saved
from tests.refused import refused
from tests.tiny import LLAVA, Scatter, chat, load_tiny, picture

TINY = Tiny("llava", "float32")
SEEDLING = located("pkg://espalier/harness/seedling/weights/seedling")
BLOCK = 16
SETTINGS = {"weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": ["lm_head"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", **SETTINGS}


def packed_folder(
    source: Path,
    target: Path,
    pack: Callable[[torch.Tensor], tuple[Mapping[str, torch.Tensor], torch.Tensor]],
    settings: Mapping[str, Any],
) -> tuple[Path, Path]:
    """Pack the decoder's matrices of a checkpoint; returns it, and the same numbers unpacked.

    `pack` returns what stands for a weight, by the endings of their names, and its numbers.
    """
    packed, unpacked = (shutil.copytree(source, target / name) for name in ("packed", "unpacked"))
    stored = load_file(source / "model.safetensors")
    small, plain = dict(stored), dict(stored)
    for name, weight in stored.items():
        if ".layers." in name and "language_model" in name and name.endswith("proj.weight"):
            tensors, numbers = pack(small.pop(name))
            small |= {name.removesuffix("weight") + end: tensor for end, tensor in tensors.items()}
            plain[name] = numbers.to(weight.dtype)
    assert small.keys() != stored.keys()
    save_file(small, packed / "model.safetensors", {"format": "pt"})
    save_file(plain, unpacked / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return packed, unpacked


def in_8_bits(weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    """Pack a matrix into 8-bit floats."""
    rows, columns = (size // BLOCK for size in weight.shape)
    blocks = weight.float().view(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    packed = (blocks / scale).to(torch.float8_e4m3fn)
    tensors = {
        "weight": packed.view(weight.shape),
        "weight_scale_inv": scale.view(rows, columns),
    }
    return tensors, (packed.float() * scale).view(weight.shape)


CHATS = [chat("how many digits are there ?", picture(seed, 96, 96)) for seed in range(2)]


def answer(
    adapter: Adapter, inputs: dict[str, Any], method: Method, ratio: float, **settings: Any
) -> Any:
    """Answer chats of `seedling` with a share of the visual tokens dropped."""
    options = {"prior": (torch.ones(12, 12),), **settings}
    return generated(adapter, inputs, method, Budget("kept", ratio), **options)


def logits_of(adapter: Adapter) -> torch.Tensor:
    return generated(adapter, TINY.inputs(), FastV(), Budget("kept", 0.5)).logits


def test_weights_of_8_bit_floats_are_unpacked_where_no_gpu_multiplies_them(tmp_path: Path) -> None:
    packed, unpacked = packed_folder(saved("llava"), tmp_path, in_8_bits, FP8)
    adapter, plain = (load_tiny(LLAVA, folder, "float32") for folder in (packed, unpacked))
    assert torch.equal(logits_of(adapter), logits_of(plain))
    assert (quantisation_of(adapter.spec), quantised_packages(adapter.spec)) == ("fp8", [])
    assert stored_bytes(adapter.spec) is None  # not the bytes that they take
    assert placement(adapter.model) == placement(plain.model)


@pytest.mark.slow
def test_a_row_and_its_key_state_the_precision(tmp_path: Path) -> None:
    packed, _ = packed_folder(SEEDLING, tmp_path, in_8_bits, FP8)
    cell = {"limit": 1, "ratio": 0.5, "store": tmp_path / "store", "paired": 0}
    rows = [
        espalier.evaluate("seedling", "fastv", "seedling_vqa", **cell, **settings).row
        for settings in ({}, {"model.path": str(packed)})
    ]
    plain, small = (row["settings"]["model"] for row in rows)
    assert "quantisation" not in plain
    assert small["quantisation"] == "fp8"
    assert "unpacked" in rows[1]["extra"]["flops_note"]
    assert set(espalier.results.load(tmp_path / "store")["precision"]) == {
        "float32",
        "fp8, float32",
    }


@pytest.mark.parametrize("kind", [kind for kind, modules in MODULES.items() if modules])
@pytest.mark.parametrize("nested", [False, True])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, nested: bool
) -> None:
    monkeypatch.setattr("espalier.harness.models.quantisation.find_spec", lambda name: None)
    config: dict[str, Any] = {"quantization_config": {"quant_method": kind}}
    config = {"text_config": config} if nested else config
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", **config}))
    packages = " ".join(MODULES[kind]).replace("_", "-")
    line = f"quantization_config: {kind}.*pip install {packages}$"
    with pytest.raises(UserError, match=line):
        load_adapter(replace(LLAVA, weights="trained", path=tmp_path))
    with pytest.raises(espalier.UserError, match=line):
        espalier.load(tmp_path)


def test_a_method_that_the_library_does_not_read_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "llava", "quantization_config": {"quant_method": "exl2"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "(quantization_config: exl2); valid: awq, bitsan" in refused(espalier.load, tmp_path)


@pytest.mark.parametrize(
    ("stated", "text"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq 4-bit"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes 4-bit nf4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes 8-bit"),
        ({"quant_method": "compressed-tensors", "format": "x"}, "compressed-tensors x"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "A8"}}}, "torchao A8"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "torchao int8_weight_only"),
    ],
)
def test_the_text_of_a_precision(tmp_path: Path, stated: dict[str, Any], text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stated}))
    assert quantisation_of(replace(LLAVA, weights="trained", path=tmp_path)) == text


def quantise(kind: str, target: Path) -> Adapter:
    """Save `seedling` with packed matrices, and load it as a checkpoint."""
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        config: Any = TorchAoConfig(Int8WeightOnlyConfig())
    elif kind == "bitsandbytes 4-bit":
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    else:
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    LlavaForConditionalGeneration.from_pretrained(
        SEEDLING, quantization_config=config, dtype=torch.float32, device_map="cpu"
    ).save_pretrained(target)
    for file in Path(SEEDLING).iterdir():
        if not (target / file.name).exists():
            shutil.copy(file, target)
    return load_adapter(named_spec(target, None, {}))


@pytest.mark.parametrize("kind", ["bitsandbytes 4-bit", "bitsandbytes 8-bit", "torchao"])
def test_packed_matrices_drop_tokens_as_they_mask_them(tmp_path: Path, kind: str) -> None:
    pytest.importorskip(kind.split()[0])
    adapter, plain = (
        quantise(kind, tmp_path / "small"),
        load_adapter(named_spec(SEEDLING, None, {})),
    )
    inputs = adapter.encode(CHATS)
    for method in (FastV(), D2Pruner(), Scatter(("prefix", 2))):
        masked, dropped = (
            answer(adapter, inputs, method, 0.5, backend=backend) for backend in ("emulate", "drop")
        )
        assert torch.equal(masked.ids, dropped.ids)
        scale = masked.logits.abs().max()
        # bitsandbytes rounds inputs of a matrix to 8 bits, and scales of 4-bit weights to bfloat16.
        limit = 1e-5 if kind == "torchao" else 2e-2
        assert (masked.logits - dropped.logits).abs().max() < limit * scale
    logits = [answer(each, inputs, FastV(), 0.5).logits for each in (adapter, plain)]
    assert not torch.equal(*logits)
    assert step_bytes(adapter) < step_bytes(plain) * 0.75
    assert stored_bytes(adapter.spec) < sum(
        file.stat().st_size for file in Path(SEEDLING).glob("*.safetensors")
    )


GROUP = 32
#: Bits of an int32 hold these columns, in this order, from the lowest.
ORDERS = {"awq": (0, 2, 4, 6, 1, 3, 5, 7), "gptq": range(8), "compressed-tensors": range(8)}
OTHERS = ("model.vision_tower", "model.multi_modal_projector", "lm_head")
STATED: dict[str, dict[str, Any]] = {
    "awq": {
        **{"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        "modules_to_not_convert": OTHERS,
    },
    "gptq": {
        **{"bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
        "checkpoint_format": "gptq",
    },
    "compressed-tensors": {
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*vision_tower.*", "re:.*multi_modal_projector.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    **{"num_bits": 4, "type": "int", "symmetric": True},
                    **{"strategy": "group", "group_size": GROUP},
                },
            }
        },
    },
}


def packed_columns(codes: torch.Tensor, order: Iterable[int]) -> torch.Tensor:
    """Pack numbers of 0 to 15 `(rows, columns)`, eight in an int32 `(rows, columns / 8)`."""
    parts = codes.long().unflatten(-1, (-1, 8))
    packed = sum(parts[..., column] << 4 * place for place, column in enumerate(order))
    return torch.where(packed < 2**31, packed, packed - 2**32).int()


def in_4_bits(kind: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    """Pack a matrix into 4 bits."""
    rows, columns = weight.shape
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / 7).half().float()
    codes = (groups / scale[..., None]).round().clamp(-8, 7) + 8
    numbers = ((codes - 8) * scale[..., None]).flatten(1)
    codes, zeros = codes.flatten(1), torch.full((columns // GROUP, rows), 8)
    order = ORDERS[kind]
    if kind == "compressed-tensors":
        tensors = {
            "weight_packed": packed_columns(codes, order),
            "weight_scale": scale,
            "weight_shape": torch.tensor([rows, columns]),
        }
    elif kind == "awq":
        tensors = {
            "qweight": packed_columns(codes.T.contiguous(), order),
            "qzeros": packed_columns(zeros, order),
            "scales": scale.T.contiguous().half(),
        }
    else:
        tensors = {
            "qweight": packed_columns(codes, order).T.contiguous(),
            "qzeros": packed_columns(zeros - 1, order),  # zeros are stored less one
            "scales": scale.T.contiguous().half(),
            "g_idx": (torch.arange(columns) // GROUP).int(),
        }
    return tensors, numbers


@pytest.mark.parametrize("kind", sorted(STATED))
def test_weights_of_4_bits_answer_as_the_numbers_that_they_stand_for(
    tmp_path: Path, kind: str
) -> None:
    for module in MODULES[kind]:
        pytest.importorskip(module)
    settings = {"quant_method": kind, **STATED[kind]}
    folders = packed_folder(Path(SEEDLING), tmp_path, partial(in_4_bits, kind), settings)
    packed, unpacked = (load_adapter(named_spec(folder, None, {})) for folder in folders)
    inputs = packed.encode(CHATS)
    for method, ratio in ((NoReduction(), 0.0), (FastV(), 0.5), (D2Pruner(), 0.5)):
        small, plain = (answer(each, inputs, method, ratio).logits for each in (packed, unpacked))
        assert (small - plain).abs().max() < 1e-4 * plain.abs().max()
    bits = (stored_bytes(packed.spec) or 0) / weight_bytes(unpacked.model)
    assert (bits < 0.5) if kind != "compressed-tensors" else (bits == 0)
