"""Hydra's access to folders of configs outside of conf/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from espalier.harness.config.hydra_internals import FolderSource
from espalier.harness.config.lmms_task_files import not_text
from espalier.harness.paths import IN_PACKAGE
from espalier.harness.specs.plugins.code_reference import CodeReference

SCHEME = "plugin"

#: Keys of a group's files that hold paths, and those that hold a name or the place of a class.
PATHS = {"benchmark": ("include_path", "sources", "path"), "model": ("path",)}
CLASSES = {"method": ("code",), "model": ("adapter",)}


class PluginSource(FolderSource):
    """Reads the files of a folder; relative paths in them start at the folder."""

    @staticmethod
    def scheme() -> str:
        """Return the word before `://` in the search path."""
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the config of a file, its paths absolute.

        Raises:
            UserError: the file is not UTF-8.
        """
        group = config_path.partition("/")[0]
        try:
            result = super().load_config(config_path)
        except UnicodeDecodeError as error:
            raise not_text(error, Path(self.path, config_path).with_suffix(".yaml")) from error
        section = OmegaConf.to_container(result.config, resolve=False)
        if isinstance(section, dict):
            for key in (*PATHS.get(group, ()), *CLASSES.get(group, ())):
                if section.get(key) is not None:
                    value = _anchored(section[key], Path(self.path), key in PATHS.get(group, ()))
                    result.config[key] = value
        return result


def place_of(folder: Path) -> str:
    """Return a folder as Hydra's search path has it."""
    return f"{SCHEME}://{folder}"


def _anchored(value: Any, folder: Path, is_path: bool) -> Any:
    """Return a value of a file with relative paths absolute; values of another type are refused later."""
    if isinstance(value, list):
        return [_anchored(item, folder, is_path) for item in value]
    reference = CodeReference.parse(value)
    if reference is not None:
        return str(reference.anchored(folder))
    if not is_path or not isinstance(value, str) or value.startswith(("~", "${", IN_PACKAGE)):
        return value
    return str((folder / value).resolve())
