"""Checks of a model before its weights are read: family, precision, settings, files."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from espalier.harness.errors import UserError, unknown_name
from espalier.harness.kinds.checks.checkpoint_files import check_checkpoint, check_shards
from espalier.harness.kinds.checks.finite_weights import check_finite
from espalier.harness.models.families import ADAPTERS, own_family
from espalier.harness.specs.hub_cache import require_cached
from espalier.harness.specs.run_spec import CHECKPOINT, ModelSpec
from espalier.harness.store.files.digests import Digests


def check_model(model: ModelSpec, offline: bool, digests: Digests) -> None:
    """Raise UserError unless the model's family, precision, settings and checkpoint allow it to be loaded.

    Cost: one read of weight files with a checksum, or with values to check (`model.check_weights`); of others the
    headers.
    """
    if model.in_memory is not None:
        return  # checked when it was wrapped
    if model.adapter not in ADAPTERS:
        raise unknown_name("model.adapter", model.adapter, ADAPTERS.names())
    if model.adapter not in ADAPTERS.names():
        own_family(model.adapter)
    _check_precision(model)
    if model.processor:
        # Imports the family's code, which takes seconds; most models state settings, and a run needs it anyway.
        ADAPTERS.load(model.adapter).check_settings(model)
    if model.conversation not in (None, CHECKPOINT) or model.prompt.join is not None:
        ADAPTERS.load(model.adapter).format(model.conversation, model.prompt.join)
    if model.weights == "random":
        if not model.architecture:
            raise UserError(
                f"model.weights='random': model={model.name!r} states no model.architecture to build; valid: trained"
            )
        return
    if model.path is not None:
        check_checkpoint(model.path, digests)
        check_finite(model, model.path)
        return
    folder = require_cached(model.name, model.hub or "", model.revision, offline)
    if folder is not None:
        if offline:  # missing files are downloaded otherwise
            check_shards(folder, f"model.hub={model.hub!r}")
        check_finite(model, folder)


def _check_precision(model: ModelSpec) -> None:
    """Refuse a precision or an attention that the device does not support, or only emulates."""
    # A device map uses the visible cards, whatever `device` is.
    cuda = torch.cuda.is_available()
    spread = model.device_map is not None and cuda
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
    # Without a GPU here the run is meant for a cluster's job, which checks its own machine.
    if model.dtype == "bfloat16" and not on_cpu and cuda and not torch.cuda.is_bf16_supported():
        raise UserError(
            f"model.dtype='bfloat16': {torch.cuda.get_device_name()} has no bfloat16; valid: float16, float32"
        )
