"""Seedling: a tiny LLaVA on synthetic scenes, trained on CPU, used to test and study token reduction."""

from __future__ import annotations

from pathlib import Path


def weights_dir(name: str = "seedling") -> Path:
    """Return the folder of a shipped model."""
    return Path(__file__).parent / "weights" / name
