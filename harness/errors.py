"""Errors that a user's input can cause: one line, the value, the valid choices, the config key."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """Something the user typed or supplied cannot work; run.py prints the line and exits with 2."""


class Refused(UserError):
    """What is asked of a method cannot be done on this model or under this budget; other methods may do it."""


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> UserError:
    """Return the error for a name that is not in a table: the config key, the name, the nearest and all valid names."""
    names = sorted(valid)
    near = get_close_matches(name, names, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return UserError(f"{kind}={name!r} is unknown{hint}; valid: {', '.join(names)}")
