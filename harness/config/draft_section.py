"""The draft model of a run: its config file with the user's options on it, and error lines that name their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from espalier.harness.settings import unknown_key


def with_options(part: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section `part` with `method.draft_options` laid over it, tables key by key.

    Raises:
        UserError: an option that a model section does not have.
    """
    for name in options:
        if name not in part:
            raise unknown_key(
                f"method.draft_options.{name}", (f"method.draft_options.{key}" for key in part)
            )
    return laid_over(part, options)


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table `below` with the entries of `above` over its own, tables key by key."""
    both = dict(below)
    for key, value in above.items():
        old = both.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            both[key] = laid_over(old, value)
        else:
            both[key] = value
    return both
