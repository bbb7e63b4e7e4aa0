"""Further folders of configs of a command line: `--config-dir own` and `hydra.searchpath=[file://own]`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from omegaconf import DictConfig

from espalier.harness.config import task_source
from espalier.harness.config.group_lists import ConfFolders
from espalier.harness.config.hydra_internals import Loader
from espalier.harness.config.overrides import HYDRAS, SEARCH, choices_of, no_override
from espalier.harness.errors import UserError, tell_once
from espalier.harness.paths import CONF
from espalier.harness.specs.plugins.installed import conf_folders, title_of


def split_folders(
    overrides: Sequence[str], config_dir: str | None
) -> tuple[list[str], tuple[Path, ...]]:
    """Return the overrides without those of the search path, and the folders that these and `--config-dir` name.

    Raises:
        UserError: a place holds no configs.
    """
    remaining, folders = [], []
    if config_dir is not None:
        folders += _folders("--config-dir", config_dir)
    for text in overrides:
        if text.partition("=")[0].lstrip("+") != SEARCH:
            remaining.append(text)
            continue
        parser = OverridesParser.create()
        try:
            value = parser.parse_override(text).value()
        except HYDRAS as error:
            raise no_override(text, parser) from error
        for place in value if isinstance(value, list) else [value]:
            folders += _folders(text, place.text if isinstance(place, QuotedString) else place)
    return remaining, tuple(dict.fromkeys(folders))


def override_of(folders: Iterable[Path], scheme: str = "file") -> list[str]:
    """Return the override of a command line that searches folders; none for no folders."""
    places = [QuotedString(f"{scheme}://{path}", Quote.double).with_quotes() for path in folders]
    return [f"{SEARCH}=[{','.join(places)}]"] if places else []


def check_owner(key: str, group: str, name: str, folders: Iterable[Path]) -> None:
    """Refuse a name that two folders of configs have.

    A name of conf/ that only installed plug-ins have as well is that of conf/, which a line reports.

    Raises:
        UserError: the line names the folders.
    """
    every = ConfFolders((CONF, *folders, *conf_folders()))
    owners = every.owners(group, name)
    if owners[:1] != [CONF] or set(owners) & set(folders):
        every.check_owner(group, name, key)
    elif len(owners) > 1:
        titles = ", ".join(map(title_of, owners[1:]))
        tell_once(f"{key}={name} is that of conf; {titles} has the name, too, and is passed over")


def check_owners(override: Override, loader: Loader, folders: Sequence[Path]) -> None:
    """Apply `check_owner` to each choice of an override from a group's files."""
    if not folders and not conf_folders():
        return
    group = override.key_or_group
    options = loader.get_group_options(group)
    for name in choices_of(override) if options else ():
        if name in options:
            check_owner(override.package or group, group, name, folders)


def check_preset(base: DictConfig, folders: Sequence[Path]) -> None:
    """Apply `check_owner` to each choice of a composed config, those of a preset included."""
    for key, name in base.hydra.runtime.choices.items():
        group, _, package = str(key).partition("@")
        # Every run has this choice by default.
        if isinstance(name, str) and (package, name) != ("compressor", "none"):
            check_owner(package or group, group, name, folders)


def _folders(key: str, place: Any) -> list[Path]:
    """Return the folder of a place; none for the tasks of lmms-eval, which are always searched."""
    scheme, mark, name = str(place).rpartition("://")
    if str(place) == task_source.PLACE:
        return []
    folder = None
    if mark and scheme == "pkg":
        try:
            spec = find_spec(name.replace("/", "."))
        except (ImportError, ValueError):
            spec = None
        if spec is not None and spec.submodule_search_locations:
            folder = Path(next(iter(spec.submodule_search_locations)))
    elif scheme in ("", "file"):
        folder = Path(name).expanduser().resolve()
    groups = [path.name for path in CONF.iterdir() if path.is_dir()]
    if folder is None or not any((folder / group).is_dir() for group in groups):
        raise UserError(
            f"{key}: {place} holds no configs; valid: a folder with method/, model/, benchmark/, ..., as "
            "--config-dir DIR or hydra.searchpath=[file://DIR, pkg://<package>]"
        )
    return [folder]
