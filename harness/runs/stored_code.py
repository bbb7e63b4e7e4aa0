"""The class of a user that a stored row names: it is imported only while its code is that of the row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.harness.config.group_lists import ConfFolders
from espalier.harness.config.method_names import setting_names
from espalier.harness.errors import UserError, foreign
from espalier.harness.paths import CONF
from espalier.harness.runs.run_settings import plugin_digest
from espalier.harness.specs.plugins.code_reference import CodeReference
from espalier.harness.specs.plugins.installed import conf_folders, plugin_at
from espalier.harness.store.files.digests import Digests


def code_digests(row: Mapping[str, Any]) -> list[Any]:
    """Return the digests of users' code in a row."""
    return [plugin.get("digest") for plugin in row["extra"].get("plugins", ())]


def named_choices(group: str) -> set[str]:
    """Return the names of a group in conf/ and in installed plug-ins, and former names of methods."""
    names = set(ConfFolders((CONF, *conf_folders())).choices(group))
    return names | set(setting_names()) if group == "method" else names


def stored_code(row: Mapping[str, Any], name: str, remedy: str = "the code of then") -> str | None:
    """Return the place of a user's class that a row names for a method; None: the name is that of a config.

    Nothing is imported: the digest of the code in that place is compared with the one in the row.

    Args:
        row: as stored.
        name: of the method.
        remedy: what is valid otherwise.

    Raises:
        UserError: there is no such code, or it has another digest, or the row has none.
    """
    if name in named_choices("method"):
        return None
    problem = f"run {row['run_key'][:12]}: the code of method={name!r}"
    with foreign(f"{problem} cannot be read", remedy):
        place = row["extra"]["code"][name]
        reference = CodeReference.parse(place)
        # Rows have absolute paths; another would lead to a file of the folder in which the row is read.
        is_whole = reference is not None and str(reference.anchored(Path.cwd())) == place
        root = reference.root if reference is not None and is_whole else None
        files = None if root is None else plugin_digest(plugin_at(root), Digests())
        if files is None or files not in code_digests(row):
            raise UserError(
                f"{problem} is not there or has changed since, and is not imported: {place!r}; valid: {remedy}"
            )
    return str(place)
