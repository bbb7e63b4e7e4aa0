"""The root of the repository, and paths of the config."""

from __future__ import annotations

from pathlib import Path

from espalier.harness.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"


def rooted(value: str) -> Path:
    """Return a path of the config; relative ones start at the repository, not at the working directory.

    Raises:
        UserError: it begins with `~` and a name that no user has.
    """
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:  # `~name`, and no user of that name
        raise UserError(f"{value!r} begins at no user's home; valid: a path, or ~/...") from error
    return path if path.is_absolute() else ROOT / path
