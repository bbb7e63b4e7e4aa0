"""A table from names to classes that are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from espalier.harness.settings import choice
from espalier.harness.specs.plugins.code_reference import CodeReference


class Registry:
    """Maps a name to `module:object` and imports the module on first use.

    The place of a user's class, `package.module:Class` or `file.py:Class`, is a name of that class.

    Args:
        kind: the config key that takes the names as values, for example `model.adapter`.
    """

    def __init__(self, kind: str) -> None:
        """Start an empty table."""
        self.kind = kind
        self._targets: dict[str, str] = {}

    def add(self, name: str, target: str) -> None:
        """Enter `name` for `target`, written `module:object`.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._targets:
            raise ValueError(
                f"{self.kind} {name!r} is registered twice: {self._targets[name]} and {target}"
            )
        self._targets[name] = target

    def names(self) -> tuple[str, ...]:
        """Return all names in alphabetical order."""
        return tuple(sorted(self._targets))

    def load(self, name: str) -> Any:
        """Import and return the object of `name`.

        Raises:
            UserError: the name is not in the table; the line lists the valid names. Or a user's class cannot be
                imported.
        """
        if name not in self._targets and (reference := CodeReference.parse(name)):
            return reference.load(self.kind)
        module, _, attribute = self._target(name).partition(":")
        return getattr(import_module(module), attribute)

    def module(self, name: str) -> str:
        """Return the module of `name`, which is not imported.

        Raises:
            UserError: the name is not in the table; the line lists the valid names.
        """
        return self._target(name).partition(":")[0]

    def _target(self, name: str) -> str:
        return self._targets[choice(self.kind, name, self._targets)]

    def __contains__(self, name: object) -> bool:
        """Return whether the name is in the table, or is the place of a user's class."""
        return name in self._targets or CodeReference.parse(name) is not None
