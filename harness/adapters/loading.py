"""Loading a checkpoint and refusing one that does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import PretrainedConfig

from harness.errors import UserError

if TYPE_CHECKING:
    from harness.config.spec import ModelSpec


def source_of(spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    """Return what `from_pretrained` takes: a directory or hub id, and the revision of the latter."""
    if spec.path is not None:
        return str(spec.path), {}
    return str(spec.hub), {"revision": spec.revision}


def load_part(spec: ModelSpec, part_class: Any, **options: Any) -> Any:
    """Return `part_class.from_pretrained` of the run's checkpoint: a processor, a tokenizer, an image processor.

    Raises:
        UserError: it is not there or does not parse.
    """
    source, revision = source_of(spec)
    try:
        return part_class.from_pretrained(source, **revision, **options)
    except (OSError, ValueError) as error:
        raise _unreadable(spec, error) from error


def template_beside(spec: ModelSpec) -> str | None:
    """Return the chat template in a local model directory, for a model that is built without its checkpoint."""
    file = None if spec.path is None else spec.path / "chat_template.jinja"
    return file.read_text(encoding="utf-8") if file is not None and file.is_file() else None


def load_checkpoint(model_class: Any, config: Any, spec: ModelSpec) -> Any:
    """Return the model of a run, on its device or spread over several.

    Args:
        model_class: the transformers class of the family.
        config: configuration to use in place of the checkpoint's own, or None.
        spec: the model's part of the run.

    Raises:
        UserError: the checkpoint cannot be found or read, or its tensors do not match the architecture.
    """
    source, options = source_of(spec)
    if config is not None:
        options["config"] = config
    else:
        _check_type(spec, model_class.config_class.model_type)
    if spec.device_map is not None:
        options["device_map"] = spec.device_map
    try:
        model, report = model_class.from_pretrained(
            source,
            dtype=getattr(torch, spec.dtype),
            attn_implementation=spec.attention,
            output_loading_info=True,
            # Reported and refused below, by name; the library's own error names no tensor.
            ignore_mismatched_sizes=True,
            **options,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _unreadable(spec, error) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(
            key
            if isinstance(key, str)
            else f"{key[0]} of shape {tuple(key[1])}, the model's has {tuple(key[2])}"
            for key in report[kind]
        )
        if names:
            raise UserError(
                f"model={spec.name}: checkpoint {source!r} has {len(names)} {kind.replace('_', ' ')}, "
                f"the first is {names[0]}{_conversion(spec)}"
            )
    return model if spec.device_map is not None else model.to(spec.device)


def _check_type(spec: ModelSpec, expected: str) -> None:
    """Refuse a checkpoint of another architecture; the library would fill in defaults and build something huge."""
    source, revision = source_of(spec)
    try:
        found, _ = PretrainedConfig.get_config_dict(source, **revision)
    except (OSError, ValueError) as error:
        raise _unreadable(spec, error) from error
    kind = found.get("model_type")
    if kind != expected:
        raise UserError(
            f"model={spec.name}: checkpoint {source!r} is of type {kind!r}, needed is {expected!r}{_conversion(spec)}"
        )


def check_facts(config: Any, spec: ModelSpec) -> None:
    """Raise UserError unless a loaded text stack is the one that the config file describes.

    Budgets and FLOPs are counted from `model.facts` before anything loads; facts of another model would falsify them.
    """
    facts = spec.facts
    found = {
        "text.layers": (facts.text.layers, config.num_hidden_layers),
        "text.hidden": (facts.text.hidden, config.hidden_size),
        "text.heads": (facts.text.heads, config.num_attention_heads),
        "text.kv_heads": (facts.text.kv_heads, config.num_key_value_heads),
        "vocabulary": (facts.vocabulary, config.vocab_size),
    }
    for key, (stated, loaded) in found.items():
        if stated != loaded:
            raise UserError(
                f"model={spec.name}: model.facts.{key}={stated}, the loaded model has {loaded}{_conversion(spec)}"
            )


def _unreadable(spec: ModelSpec, error: Exception) -> UserError:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return UserError(
        f"model={spec.name}: no usable checkpoint at {source_of(spec)[0]!r} ({reason}); "
        f"give a local directory with model.path=<dir>{_conversion(spec)}"
    )


def _conversion(spec: ModelSpec) -> str:
    """Say how the original release becomes loadable, for models whose release is in another format."""
    return (
        ""
        if spec.conversion is None
        else f"; the original release is converted by: {spec.conversion}"
    )
