"""Where the repository lies, and where a path of the config does."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def rooted(value: str) -> Path:
    """Return a path of the config; relative ones start at the repository, whatever the working directory is."""
    path = Path(value).expanduser()
    return path if path.is_absolute() else ROOT / path
