"""Whether a checkpoint's output head is its embedding, or has weights of its own, which must be there then."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from espalier.harness.errors import UserError
from espalier.harness.models.loader import MALFORMED, config_of, source_of
from espalier.harness.specs.hub_cache import cached_file

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec

KEY = "tie_word_embeddings"
HEAD = "lm_head.weight"
INDEX = "model.safetensors.index.json"


def settle_head(config: Any, spec: ModelSpec, renames: Mapping[str, str]) -> None:
    """Set `tie_word_embeddings` of a checkpoint's configuration: true where nobody denies it and no head is stored.

    The library's classes have defaults of their own, under which a head that is missing is the embedding without a
    word. The model's file, the checkpoint's config.json and the names of its tensors are asked instead.

    Args:
        config: of the model, as the library read it.
        spec: the model's part of the run.
        renames: from patterns of the checkpoint's tensor names to the library's.

    Raises:
        UserError: no head is stored, and the model's file or the checkpoint says that it is not the embedding.

    Cost: the names of the tensors; no weight is read.
    """
    stated = [
        value
        for value in (_of_file(config, spec), _of_checkpoint(config, spec))
        if value is not None
    ]
    stored = _stores_head(spec, renames)
    tied = all(stated) if stated else bool(getattr(config, KEY, False)) and not stored
    if stored is False and not tied:
        conversion = "" if spec.conversion is None else f", converted by: {spec.conversion}"
        raise UserError(
            f"model={spec.name}: checkpoint {source_of(spec)[0]!r} has no {HEAD}, and {KEY} is false; "
            f"valid: all files of the original checkpoint{conversion}"
        )
    setattr(config, KEY, tied)


def _of_file(config: Any, spec: ModelSpec) -> bool | None:
    """Return what the model's file states, or means by leaving it out; None without a description of the model."""
    if not spec.architecture:
        return None
    parts = [spec.architecture.get(part, {}) for part in ("model", "text")]
    stated = [bool(part[KEY]) for part in parts if KEY in part]
    return any(stated) if stated else bool(getattr(type(config), KEY, False))


def _of_checkpoint(config: Any, spec: ModelSpec) -> bool | None:
    """Return what config.json states, of the whole model or else of its text stack; None if it states neither."""
    stored = config_of(spec)
    if KEY in stored:
        return bool(getattr(config, KEY, False))
    text = stored.get("text_config")
    value = text.get(KEY) if isinstance(text, dict) else None
    return None if value is None else bool(value)


def _stores_head(spec: ModelSpec, renames: Mapping[str, str]) -> bool | None:
    """Return whether the checkpoint's tensors include the head; None if its files are not on this machine."""
    names = _names(spec)
    if names is None:
        return None
    for pattern, name in renames.items():
        names = [re.sub(pattern, name, key) for key in names]
    return any(name.endswith(HEAD) for name in names)


def _names(spec: ModelSpec) -> list[str] | None:
    """Return the names of a local checkpoint's tensors; None if it is not here, or does not parse, as loading tells."""
    path = cached_file(spec, "config.json") if spec.path is None else spec.path / "config.json"
    if path is None:
        return None
    index = path.parent / INDEX
    try:
        if index.is_file():
            return list(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        return [
            name for file in path.parent.glob("*.safetensors") for name in _header(file)
        ] or None
    except MALFORMED:
        return None


def _header(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())
