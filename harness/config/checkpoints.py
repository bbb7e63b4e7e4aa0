"""What can be known to be wrong with a model before its weights are read: family, precision, settings, files."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from harness.adapters.base import ADAPTERS
from harness.config.spec import ModelSpec
from harness.errors import UserError, unknown_name
from harness.running.keys import Digests, cached_commit


def check_model(model: ModelSpec, offline: bool, digests: Digests) -> None:
    """Raise UserError unless the model's family, precision, settings and checkpoint allow it to be loaded.

    Cost: one read of weight files that have a checksum; of others the headers.
    """
    if model.adapter not in ADAPTERS:
        raise unknown_name("model.adapter", model.adapter, ADAPTERS.names())
    _check_precision(model)
    if model.processor:
        # Imports the family's code, which takes seconds; most models state settings, and a run needs it anyway.
        ADAPTERS.load(model.adapter).check_settings(model)
    if model.weights == "random":
        if not model.architecture:
            raise UserError(
                f"model.weights='random': model={model.name!r} states no model.architecture to build; valid: trained"
            )
        return
    if model.path is None:
        if offline and cached_commit(model) is None:
            raise UserError(
                f"model.hub={model.hub!r} is not in the local Hugging Face cache; valid: model.path=<directory>, "
                "or offline=false to download it"
            )
        return
    check_checkpoint(model.path, digests)


def _check_precision(model: ModelSpec) -> None:
    """Refuse what the device cannot compute, or only in emulation."""
    import torch

    # A map spreads over the visible cards, wherever `device` points.
    spread = model.device_map is not None and torch.cuda.is_available()
    on_cpu = model.device == "cpu" and not spread
    if on_cpu and model.dtype == "float16":
        raise UserError(
            "model.dtype='float16' on the CPU: half precision is slow and overflows there; valid: float32, bfloat16"
        )
    if model.attention == "flash_attention_2" and (on_cpu or model.dtype == "float32"):
        raise UserError(
            f"model.attention='flash_attention_2' needs a GPU and half precision, not {model.dtype} on "
            f"{model.device}; valid: sdpa, eager"
        )
    if model.attention == "flash_attention_2" and find_spec("flash_attn") is None:
        raise UserError(
            "model.attention='flash_attention_2' needs the package flash-attn, which is not installed; "
            "valid: sdpa, eager"
        )
    if model.dtype == "bfloat16" and not on_cpu and not torch.cuda.is_bf16_supported():
        raise UserError(
            f"model.dtype='bfloat16': {torch.cuda.get_device_name()} has no bfloat16; valid: float16, float32"
        )


def check_checkpoint(path: Path, digests: Digests) -> None:
    """Raise UserError unless `path` holds a model config and whole weight files.

    A weight file is whole if its header parses and promises exactly the bytes that follow, and if it has the SHA-256
    of a `<file>.sha256` beside it, where there is one. Cost: one read of files that have a checksum, headers otherwise.
    """
    weights = sorted(path.glob("*.safetensors"))
    if not (path / "config.json").is_file() or not weights:
        raise UserError(
            f"model.path={str(path)!r} holds no model; valid: a directory with config.json and *.safetensors"
        )
    for file in weights:
        problem = _damage(file)
        recorded = file.with_name(f"{file.name}.sha256")
        if problem is None and recorded.is_file():
            expected = recorded.read_text().split()[:1]
            if expected != [digests.file(file)]:
                problem = f"its SHA-256 differs from {recorded.name}"
        if problem is not None:
            raise UserError(
                f"model.path: weight file {str(file)!r} is damaged: {problem}; valid: the original file"
            )


def _damage(file: Path) -> str | None:
    """Return what is wrong with a safetensors file: 8 bytes of header length, a JSON header, then the tensors."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            return f"{size} bytes are too few for its header"
        try:
            header = json.loads(stream.read(length))
            ends = [
                entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
            ]
        except (ValueError, AttributeError, KeyError, TypeError, IndexError):
            return "its header does not parse"
    promised = 8 + length + max(ends, default=0)
    return None if promised == size else f"{size} bytes, its header promises {promised}"
