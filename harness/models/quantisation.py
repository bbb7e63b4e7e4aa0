"""Quantised checkpoints: the method that config.json states, the package that reads it, and the bytes of the files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from espalier.harness.errors import FOREIGN, UserError
from espalier.harness.specs.hub_cache import cached_file
from espalier.harness.specs.run_spec import ModelSpec

KEY = "quantization_config"

#: Methods that transformers reads, and the modules of the packages that each needs.
MODULES: Mapping[str, tuple[str, ...]] = {
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed_tensors",),
    "fp8": (),
    "gptq": ("gptqmodel", "optimum"),
    "torchao": ("torchao",),
}

#: Where packages have other names than their modules.
PACKAGES: Mapping[str, str] = {"compressed_tensors": "compressed-tensors"}

#: Compute capability of a GPU that multiplies numbers of 8 bits; others get the weights unpacked.
FP8_GPU = (8, 9)


def check_quantisation(name: str, source: str, config: Mapping[str, Any]) -> None:
    """Refuse quantised weights that no package of this machine reads, by config.json alone.

    Args:
        name: of the model in the error line.
        source: of the checkpoint in the error line.
        config: content of its config.json.

    Raises:
        UserError: one line with the package to install, or the methods that can be read.
    """
    stated = _stated(config)
    if stated is None:
        return
    method = _method(stated)
    line = f"model={name}: checkpoint {source!r} has quantised weights ({KEY}: {method})"
    if method not in MODULES:
        raise UserError(
            f"{line}; valid: {', '.join(MODULES)}, or the release in float16 or bfloat16"
        )
    missing = [module for module in MODULES[method] if find_spec(module) is None]
    if missing:
        packages = " ".join(PACKAGES.get(module, module) for module in missing)
        raise UserError(
            f"{line}, which need a package that is not here; valid: pip install {packages}"
        )


def quantised_packages(model: ModelSpec) -> list[str]:
    """Return the packages that unpack a model's weights."""
    stated = _stated(_config(model))
    modules = () if stated is None else MODULES.get(_method(stated), ())
    return [PACKAGES.get(module, module) for module in modules]


def quantisation_of(model: ModelSpec) -> str | None:
    """Return method and bits of a model's quantised weights, such as `bitsandbytes 8-bit`; None: they are not."""
    stated = _stated(_config(model))
    if stated is None:
        return None
    method, kind = _method(stated), str(stated.get("format") or "")
    if method == "bitsandbytes":
        four_bit = f"4-bit {stated.get('bnb_4bit_quant_type', '')}"
        kind = "8-bit" if stated.get("load_in_8bit") else four_bit
    elif method == "torchao":
        quant_type = stated.get("quant_type")
        # Its file nests settings by module.
        while isinstance(quant_type, Mapping) and "_type" not in quant_type and quant_type:
            quant_type = next(iter(quant_type.values()))
        named = quant_type.get("_type", "") if isinstance(quant_type, Mapping) else quant_type
        kind = str(named or "")
    elif "bits" in stated:
        kind = f"{stated['bits']}-bit"
    return f"{method} {kind}".strip()


def stored_bytes(model: ModelSpec) -> int | None:
    """Return the bytes that a model's quantised weights take, by the sizes of their files.

    None: the weights are not quantised, their files are not here, or they are unpacked while they are read.
    """
    stated = _stated(_config(model))
    folder = checkpoint_folder(model)
    if stated is None or folder is None:
        return None
    method = _method(stated)
    # The package of compressed tensors has no product of packed matrices.
    if method == "compressed-tensors":
        return None
    if method == "fp8":
        # Takes seconds, which most callers need not wait for.
        import torch

        if model.device == "cpu" or torch.cuda.get_device_capability() < FP8_GPU:
            return None
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None


def unpack(model: Any) -> None:
    """Unpack compressed tensors, which their package does during the first forward pass, where it would be timed."""
    if hasattr(model, "ct_decompress_hook"):
        model.hf_quantizer.compressor.decompress_model(model)


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantisation of a config.json, or of its text stack."""
    text = config.get("text_config")
    places = (config, text if isinstance(text, Mapping) else {})
    stated = next((place[KEY] for place in places if place.get(KEY) is not None), None)
    return stated if stated is None or isinstance(stated, Mapping) else {"quant_method": stated}


def _method(stated: Mapping[str, Any]) -> str:
    # Older releases of bitsandbytes state no method.
    old = any(stated.get(f"load_in_{bits}bit") for bits in (4, 8))
    return str(stated.get("quant_method", "bitsandbytes" if old else None))


def checkpoint_folder(model: ModelSpec) -> Path | None:
    """Return the folder of a checkpoint; None if it is not on this machine."""
    file = cached_file(model, "config.json") if model.path is None else model.path / "config.json"
    return None if file is None or model.weights == "random" else file.parent


def _config(model: ModelSpec) -> Mapping[str, Any]:
    """Return the config.json of a checkpoint on this machine; empty if it cannot be read, which loading reports."""
    folder = checkpoint_folder(model)
    try:
        config = {} if folder is None else json.loads((folder / "config.json").read_bytes())
    except FOREIGN:
        return {}
    return config if isinstance(config, Mapping) else {}
