"""The choices of the groups of conf/, read as plain YAML, without Hydra and torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.errors import UserError
from espalier.harness.paths import CONF
from espalier.harness.specs.plugins.installed import title_of

_ASKED = re.compile(r"\+?(\w+)=\?")

Section = dict[str, Any]


def asked_groups(arguments: Iterable[str]) -> tuple[str, ...]:
    """Return the config groups that a command line wants listed: `benchmark` for `benchmark=?`."""
    matches = (_ASKED.fullmatch(text) for text in arguments)
    groups = (match[1] for match in matches if match)
    return tuple(group for group in groups if (CONF / group).is_dir() or group == "anchor")


def asked_model(arguments: Iterable[str]) -> str | None:
    """Return the model that a command line gives with a listing: `model=llava15_7b method=?`."""
    names = [text.partition("=")[2] for text in arguments if text.startswith("model=")]
    return next((name for name in names if name != "?"), None)


def names_folders(arguments: Iterable[str]) -> bool:
    """Return whether a command line names further folders of configs."""
    return any(text.startswith(("--config-dir", "hydra.searchpath")) for text in arguments)


@dataclass(frozen=True)
class ConfFolders:
    """Folders of configs, in the order in which a name is looked for.

    Attributes:
        folders: the folders.
        read: reads a file. YAML 1.1 has no number 1.0e4, Hydra has.
    """

    folders: tuple[Path, ...] = (CONF,)
    read: Callable[[Path], Section] = read_yaml

    def owners(self, group: str, name: str) -> list[Path]:
        """Return the folders that have a file of a name."""
        return [folder for folder in self.folders if (folder / group / f"{name}.yaml").is_file()]

    def check_owner(self, group: str, name: str, key: str | None = None) -> None:
        """Raise UserError if several folders have a file of a name; `key` is that of the line, else the group."""
        owners = self.owners(group, name)
        if len(owners) > 1:
            titles = " and ".join("conf" if path == CONF else title_of(path) for path in owners)
            raise UserError(
                f"{key or group}={name!r} is a file of {titles}; valid: of one of them alone"
            )

    def choices(self, group: str) -> list[str]:
        """Return the names of a group's files."""
        files = [path for folder in self.folders for path in (folder / group).glob("*.yaml")]
        return sorted({path.stem for path in files})

    def read_choice(self, group: str, name: str) -> Section:
        """Return the section of a file, merged over its defaults; `${}` stays unresolved."""
        return self._read(self._file(f"{group}/{name}"))

    def comment(self, group: str, name: str) -> str:
        """Return the first sentence of the comment at the head of a file."""
        lines = self._file(f"{group}/{name}").read_text(encoding="utf-8").splitlines()
        words = (line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))
        text = " ".join(line for line in words if not line.startswith("@package"))
        return re.split(r"(?<=[.?])\s", text, maxsplit=1)[0].rstrip(".")

    def _read(self, path: Path) -> Section:
        entries = self.read(path)
        section: Section = {}
        for default in entries.pop("defaults", ["_self_"]):
            if isinstance(default, Mapping):
                # `override /benchmark: ...` is a choice from another group.
                continue
            below = entries if default == "_self_" else self._read(self._default(default, path))
            section = merged(section, below)
        return section

    def _default(self, default: str, path: Path) -> Path:
        """Return the file that an entry of a defaults list names: in the folder of `path`, or from the top of conf/."""
        name = default.partition("@")[0]
        if name.startswith("/"):
            return self._file(name[1:])
        group = next(path.parent.relative_to(at) for at in self.folders if path.is_relative_to(at))
        return self._file(f"{group}/{name}")

    def _file(self, name: str) -> Path:
        """Return the first file of a name, that of the first folder where there is none."""
        files = [folder / f"{name}.yaml" for folder in self.folders]
        return next((file for file in files if file.is_file()), files[0])


_REPOSITORY = ConfFolders()
choices, read_choice, comment = (
    _REPOSITORY.choices,
    _REPOSITORY.read_choice,
    _REPOSITORY.comment,
)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Section:
    """Return the table `below`, overridden by the entries of `above`; tables within it are merged as well."""
    tables = {key: merged(below[key], above[key]) for key in above if _tables(below, above, key)}
    return {**below, **above, **tables}


def _tables(below: Mapping[str, Any], above: Mapping[str, Any], key: str) -> bool:
    return isinstance(below.get(key), Mapping) and isinstance(above[key], Mapping)
