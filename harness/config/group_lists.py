"""The files of conf/ and of folders like it, read as plain YAML without Hydra and torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from espalier.harness.config.lmms_task_files import read_conf
from espalier.harness.errors import UserError
from espalier.harness.paths import CONF, IN_PACKAGE
from espalier.harness.specs.plugins.code_reference import CodeReference
from espalier.harness.specs.plugins.installed import title_of

_ASKED = re.compile(r"\+?(\w+)=\?")

#: Keys of a group's files that hold paths, and those that hold a name or the place of a class.
PATHS = {"benchmark": ("include_path", "sources", "path"), "model": ("path",)}
CLASSES = {"method": ("code",), "model": ("adapter",)}

Section = dict[str, Any]


def asked_groups(arguments: Iterable[str]) -> tuple[str, ...]:
    """Return the config groups that a command line wants listed: `benchmark` for `benchmark=?`."""
    groups = (match[1] for match in map(_ASKED.fullmatch, arguments) if match)
    return tuple(group for group in groups if (CONF / group).is_dir() or group == "anchor")


def asked_model(arguments: Iterable[str]) -> str | None:
    """Return the model that a command line gives with a listing: `model=llava15_7b method=?`."""
    names = [text.partition("=")[2] for text in arguments if text.startswith("model=")]
    return next((name for name in names if name != "?"), None)


def names_folders(arguments: Iterable[str]) -> bool:
    """Return whether a command line names further folders of configs."""
    return any(text.startswith(("--config-dir", "hydra.searchpath")) for text in arguments)


class Choice(NamedTuple):
    """A group of files, and the dotted key at which the content of the chosen file stands."""

    group: str
    package: str


class Default(NamedTuple):
    """An entry of a defaults list: `_self_`, a file to start from, a choice, or the override of one.

    Attributes:
        choice: the group and the key of the file's content.
        names: files of the group; none for an empty choice.
        changes: whether it changes a choice that another file makes.
        can_change: whether others may change it.
    """

    choice: Choice
    names: tuple[str, ...]
    changes: bool
    can_change: bool


@dataclass(frozen=True, eq=False)
class ConfFile:
    """A file of configs, or a config without a file.

    Attributes:
        content: its values, `${}` unresolved.
        defaults: as it lists them.
        is_global: whether the values stand at the top of the config, in place of the key of the group.
    """

    content: Mapping[str, Any]
    defaults: tuple[Any, ...] = ("_self_",)
    is_global: bool = False


#: A file, and the dotted key at which its content stands; files are merged in order.
Layer = tuple[str, ConfFile]


@dataclass
class ConfFolders:
    """Folders of configs, in the order in which a name is looked for; each file is read once.

    Attributes:
        folders: the folders.
    """

    folders: tuple[Path, ...] = (CONF,)
    _files: dict[tuple[str, str], ConfFile] = field(default_factory=dict)

    def owners(self, group: str, name: str) -> list[Path]:
        """Return the folders that have a file of a name."""
        # Unlike Path.is_file, no error for a place that is too long for a name.
        files = ((folder, os.path.join(folder, group, f"{name}.yaml")) for folder in self.folders)
        return [folder for folder, file in files if "/" not in name and os.path.isfile(file)]

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
        section: Section = {}
        for package, file in self.layers(Choice(group, group), name, {}, {}):
            if package == group:
                section = merged(section, file.content)
        return section

    def comment(self, group: str, name: str) -> str:
        """Return the first sentence of the comment at the head of a file."""
        path = next(iter(self.owners(group, name))) / group / f"{name}.yaml"
        lines = path.read_text(encoding="utf-8").splitlines()
        words = (line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))
        text = " ".join(line for line in words if not line.startswith("@package"))
        return re.split(r"(?<=[.?])\s", text, maxsplit=1)[0].rstrip(".")

    def layers(
        self,
        choice: Choice,
        name: str,
        chosen: MutableMapping[Choice, str],
        met: dict[Choice, str],
        appended: Sequence[Default] = (),
    ) -> list[Layer]:
        """Return the files that a file is merged from, in their order, itself among them.

        Later defaults are followed first, so that a model's file can change the choice of a benchmark.

        Args:
            choice: where the file's content stands.
            name: the file.
            chosen: files in place of those that defaults name; overrides of defaults lists are added to it.
            met: gets each choice that a defaults list makes, with the name that stands.
            appended: further defaults.

        Raises:
            UserError: a file cannot be read, or two defaults make one choice.
        """
        file = self.file(choice.group, name)
        package = "" if file.is_global else choice.package
        defaults = [_default(entry, choice.group, package) for entry in file.defaults]
        for default in defaults:
            if default is not None and default.changes:
                chosen.setdefault(default.choice, *default.names)
        parts: list[list[Layer]] = []
        for default in reversed([*defaults, *appended]):
            if default is None:
                parts.append([(package, file)])
            elif not default.changes:
                names: Iterable[str] = default.names
                if default.can_change:
                    if default.choice in met:
                        key = default.choice.package
                        raise UserError(f"{key} is chosen twice; valid: {key}=<name>, without +")
                    names = [chosen[default.choice]] if default.choice in chosen else names
                    met.update((default.choice, name) for name in names)
                parts += [self.layers(default.choice, name, chosen, met) for name in names]
        return [layer for part in reversed(parts) for layer in part]

    def file(self, group: str, name: str) -> ConfFile:
        """Return the first file of a name.

        Raises:
            UserError: there is none, or it cannot be read.
        """
        if (group, name) not in self._files:
            self._files[group, name] = self._read(group, name)
        return self._files[group, name]

    def _read(self, group: str, name: str) -> ConfFile:
        owners = self.owners(group, name)
        if not owners:
            raise UserError(
                f"{group}={name!r} is in no folder of configs; valid: {', '.join(self.choices(group))}"
            )
        content, is_global = read_conf(owners[0] / group / f"{name}.yaml")
        defaults = content.pop("defaults", [])
        if "_self_" not in defaults:
            defaults = [*defaults, "_self_"]
        if owners[0] != self.folders[0]:
            for key in (*PATHS.get(group, ()), *CLASSES.get(group, ())):
                if content.get(key) is not None:
                    content[key] = _anchored(content[key], owners[0], key in PATHS.get(group, ()))
        return ConfFile(content, tuple(defaults), is_global)


def _default(entry: Any, group: str, package: str) -> Default | None:
    """Return an entry of the defaults list of a file of `group` with its content at `package`; None for `_self_`."""
    if entry == "_self_":
        return None
    words, names = next(iter(entry.items())) if isinstance(entry, Mapping) else (entry, None)
    *marks, words = str(words).split()
    where, _, at = words.partition("@")
    path = where[1:] if where.startswith("/") else f"{group}/{where}".strip("/")
    relative = where.lstrip("/")
    if not isinstance(entry, Mapping):
        (path, _, names), relative = path.rpartition("/"), relative.rpartition("/")[0]
    if at.startswith("_global_"):
        package = at.removeprefix("_global_").lstrip(".")
    elif at != "_here_":
        package = f"{package}.{at or relative.replace('/', '.')}".strip(".")
    listed = tuple(names if isinstance(names, list) else [] if names is None else [names])
    return Default(Choice(path, package), listed, "override" in marks, isinstance(entry, Mapping))


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


_REPOSITORY = ConfFolders()
choices, read_choice, comment = (
    _REPOSITORY.choices,
    _REPOSITORY.read_choice,
    _REPOSITORY.comment,
)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Section:
    """Return the table `below`, overridden by the entries of `above`; tables within it are merged as well."""
    tables = {
        key: merged(below[key], value)
        for key, value in above.items()
        if isinstance(value, Mapping) and isinstance(below.get(key), Mapping)
    }
    return {**below, **above, **tables}
