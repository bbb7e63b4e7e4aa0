"""What the local Hugging Face cache has of a model; nothing is downloaded here."""

from __future__ import annotations

from pathlib import Path

from espalier.harness.specs.run_spec import ModelSpec


def cached_commit(model: ModelSpec) -> str | None:
    """Return the commit of `model.hub` at `model.revision` in the local Hugging Face cache, if it is there."""
    path = cached_file(model, "config.json")
    return None if path is None else path.parent.name


def cached_file(model: ModelSpec, name: str) -> Path | None:
    """Return a file of `model.hub` at `model.revision` in the local Hugging Face cache, if it is there."""
    # huggingface_hub reads HF_HUB_OFFLINE when it is imported, and commands that import this file set it first.
    from huggingface_hub import try_to_load_from_cache

    if model.hub is None:
        return None
    path = try_to_load_from_cache(model.hub, name, revision=model.revision)
    return Path(path) if isinstance(path, str) else None
