"""Every model family as a tiny instance: a new family adds a module here, with its FAMILIES."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from tests.tiny import Family

FAMILIES: dict[str, Family] = {}
for _module in sorted(module.name for module in iter_modules(__path__)):
    FAMILIES |= import_module(f"{__name__}.{_module}").FAMILIES
