"""A table from names to lazily imported objects; the only place where a name chooses code."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from harness.errors import unknown_name


class Registry:
    """Maps a name to `module:object` without importing the module until it is asked for.

    Args:
        kind: the config key whose values the names are, for example `method`.
    """

    def __init__(self, kind: str) -> None:
        """Start an empty table."""
        self.kind = kind
        self._targets: dict[str, str] = {}

    def add(self, name: str, target: str) -> None:
        """Enter `name` for `target`, written `module:object`.

        Raises:
            ValueError: the name is taken, or the target is not of the form `module:object`.
        """
        if name in self._targets:
            taken = self._targets[name]
            raise ValueError(f"{self.kind} {name!r} is registered twice: {taken} and {target}")
        module, separator, attribute = target.partition(":")
        if not (module and separator and attribute):
            raise ValueError(f"{self.kind} {name!r}: target {target!r} is not `module:object`")
        self._targets[name] = target

    def names(self) -> tuple[str, ...]:
        """Return all names in alphabetical order."""
        return tuple(sorted(self._targets))

    def target(self, name: str) -> str:
        """Return the `module:object` of `name` without importing it.

        Raises:
            UserError: the name is not in the table; the line lists the valid names.
        """
        if name not in self._targets:
            raise unknown_name(self.kind, name, self._targets)
        return self._targets[name]

    def load(self, name: str) -> Any:
        """Import and return the object of `name`.

        Raises:
            UserError: the name is not in the table; the line lists the valid names.
        """
        module, _, attribute = self.target(name).partition(":")
        return getattr(import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        """Say whether the name is in the table."""
        return name in self._targets
