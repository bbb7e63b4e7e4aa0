"""The composer of cells: from files and overrides to the config of a run, as plain data with every reference resolved.

Runs, dry runs, jobs, `espalier.evaluate`, drafts and cells of published tables compose here. Files are merged as Hydra
merges them: a choice from a group stands at the group's key, later files replace values of earlier ones, and overrides
come last. A sweep reads each file once and merges each section once, not once for every cell.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from espalier.harness.config import checkpoint_names, resolvers
from espalier.harness.config.catalogue import Catalogue
from espalier.harness.config.group_lists import Choice, ConfFile, Default, Layer, merged
from espalier.harness.config.kept_tokens import KEEP, settled
from espalier.harness.config.overrides import parse
from espalier.harness.errors import UserError
from espalier.harness.settings import unknown_key

#: By the keys of conf/config.yaml. Cells of one command share equal parts, which must not be changed.
Cell = Mapping[str, Any]

#: The file that every config starts from.
ROOT = "config"

#: Keys of a composed config that describe the sweep and not a cell.
OF_THE_SWEEP = ("hydra", "grids")

#: The settings of Hydra that presets may have.
HYDRA = ConfFile({"hydra": {"mode": None, "sweeper": {"params": None}}})


class Piece:
    """The part of a config below one key.

    Args:
        written: the value from the files and the command line, with references unresolved.
    """

    def __init__(self, written: Any) -> None:
        self.written = written

    @cached_property
    def refers(self) -> bool:
        """Whether it can only be resolved with the other keys: it has a reference or a missing value."""
        return refers(self.written)

    @cached_property
    def node(self) -> Node:
        """The value as a node of OmegaConf, which one config at a time can hold."""
        return cast("Node", OmegaConf.create({"it": self.written})._get_node("it"))


def refers(value: Any) -> bool:
    """Return whether plain data has a reference or a missing value."""
    if isinstance(value, dict):
        return any(map(refers, value.values()))
    if isinstance(value, list):
        return any(map(refers, value))
    return isinstance(value, str) and ("${" in value or value == "???")


def empty_config() -> DictConfig:
    """Return a config into which nodes move from the last one: copying them costs ten times as much."""
    return OmegaConf.create({}, flags={"no_deepcopy_set_nodes": True})


def resolved(
    pieces: Mapping[str, Piece],
    keys: Iterable[str] | None = None,
    config: DictConfig | None = None,
) -> dict[str, Any]:
    """Return the config of these pieces as plain data; those without references stay as they are.

    Args:
        pieces: by key.
        keys: those to return; None: all.
        config: in which they are resolved, after those of another cell; None: one of their own.

    Raises:
        UserError: a reference leads nowhere, or a value is missing.
    """
    keys = pieces if keys is None else keys
    if not any(pieces[key].refers for key in keys):
        return {key: pieces[key].written for key in keys}
    config = empty_config() if config is None else config
    try:
        fill(config, {key: piece.node for key, piece in pieces.items()})
        return {
            key: _plain(config, key) if pieces[key].refers else pieces[key].written for key in keys
        }
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or 'config'}: {str(error).splitlines()[0]}") from error


def fill(config: DictConfig, nodes: Mapping[str, Node]) -> None:
    """Make these nodes the content of a config; a node that it already holds costs nothing."""
    present = {str(key): cast("Node", config._get_node(key)) for key in config}
    for key, node in present.items():
        if nodes.get(key) is not node:
            # One that still belongs to the config would be copied when it comes back.
            node._set_parent(None)
            del config[key]
    for key, node in nodes.items():
        if present.get(key) is not node or node._get_parent() is not config:
            config[key] = node


def _plain(config: DictConfig, key: str) -> Any:
    value = config[key]
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    return value


class Composer:
    """Composes the cells of one command.

    Args:
        catalogue: the names that overrides choose from.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        resolvers.register()
        self.catalogue = catalogue
        self._parsed: dict[str, Override] = {}
        self._pieces: dict[tuple[Any, ...], Piece | None] = {}
        self._checked: set[tuple[Choice, str]] = set()
        self._config = empty_config()

    def cell(self, overrides: Iterable[str]) -> Cell:
        """Return the resolved config of a cell. Cost: 1 ms, and some milliseconds for each file read.

        Raises:
            UserError: what is wrong with the overrides.
        """
        return resolved(settled_pieces(self.pieces(overrides)), config=self._config)

    def pieces(self, overrides: Iterable[str]) -> dict[str, Piece]:
        """Return the unresolved piece of each key of a config, those of the sweep among them.

        Raises:
            UserError: a choice or a value cannot be set.
        """
        chosen: dict[Choice, str] = {}
        appended, values = [], []
        for text in overrides:
            if text not in self._parsed:
                (self._parsed[text],) = parse([text], self.catalogue)
            override = self._parsed[text]
            group, value = override.key_or_group, override.value()
            if isinstance(value, dict) or not self.catalogue.is_group(group):
                values.append(override)
                continue
            choice, name = Choice(group, override.package or group.replace("/", ".")), str(value)
            if override.is_delete() or override.is_force_add():
                key = override.get_key_element().lstrip("+~")
                raise UserError(
                    f"{text}: a choice is neither deleted nor added; valid: {key}=<name>"
                )
            if override.is_add():
                appended.append(Default(choice, (name,), changes=False, can_change=True))
            else:
                chosen[choice] = name
        return self._merged(chosen, appended, values)

    def section(
        self, group: str, name: str, key: str | None = None, values: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return the section that `<group>=<name>` composes, as plain data of its own.

        Args:
            group: a group of names.
            name: one of them.
            key: what an error line calls the name; None: the group.
            values: further overrides.

        Raises:
            UserError: no folder has such a name, or two have it.

        Cost: 20 ms.
        """
        if group == checkpoint_names.GROUP:
            name = checkpoint_names.model_choice(name, key or group)
        self.catalogue.check(key or group, group, name)
        pieces = self._merged({Choice(group, group): name}, (), parse(values, self.catalogue))
        section = copy.deepcopy(resolved(pieces, [group])[group])
        assert isinstance(section, dict)
        return section

    def _merged(
        self, chosen: dict[Choice, str], appended: Sequence[Default], values: Iterable[Override]
    ) -> dict[str, Piece]:
        """Return the pieces of the files that choices name, with values set."""
        met: dict[Choice, str] = {}
        layers = self.catalogue.layers(Choice("", ""), ROOT, chosen, met, appended)
        for choice in chosen.keys() - met.keys():
            if not choice.group.startswith("hydra/"):
                key = choice.group
                if choice.package != choice.group.replace("/", "."):
                    key += f"@{choice.package}"
                line = f"{key}={chosen[choice]}"
                raise UserError(f"{line}: conf/{ROOT}.yaml has no choice of {key}; valid: +{line}")
        for choice, name in met.items() - self._checked:
            # Every run has this choice by default.
            if (choice.package, name) != ("compressor", "none"):
                self.catalogue.check(choice.package, choice.group, name)
        self._checked |= met.items()
        by_key: dict[str, list[Layer]] = {}
        for package, file in (("", HYDRA), *layers):
            for key in [package.partition(".")[0]] if package else file.content:
                by_key.setdefault(key, []).append((package, file))
        changes: dict[str, list[Override]] = {}
        for override in values:
            key = override.key_or_group.partition(".")[0]
            if key not in by_key and not (override.is_add() or override.is_force_add()):
                sections = {
                    place
                    for parts in by_key.values()
                    for place, file in parts
                    if place and key in file.content
                }
                keys = [f"{section}.{key}" for section in sorted(sections)]
                raise unknown_key(override.key_or_group, by_key.keys() - {"hydra"}, keys)
            changes.setdefault(key, []).append(override)
        pieces = {}
        for key in dict.fromkeys((*by_key, *changes)):
            parts, overrides = by_key.get(key, ()), changes.get(key, ())
            piece_key = (key, *parts, *(override.input_line for override in overrides))
            if piece_key not in self._pieces:
                self._pieces[piece_key] = _piece(key, parts, overrides)
            piece = self._pieces[piece_key]
            if piece is not None:
                pieces[key] = piece
        return pieces


def compose_section(
    group: str,
    name: str,
    key: str | None = None,
    values: Sequence[str] = (),
    folders: Sequence[Path] = (),
) -> dict[str, Any]:
    """Return `Composer.section` of a composer of its own; `folders` are further folders of configs."""
    return Composer(Catalogue(folders)).section(group, name, key, values)


def settled_pieces(pieces: Mapping[str, Piece]) -> dict[str, Piece]:
    """Return the pieces of a cell, without those of the sweep, as ratio or number of tokens replace each other.

    Raises:
        UserError: another setting refers to the ratio, and a number of tokens leaves it open.
    """
    cell = {key: piece for key, piece in pieces.items() if key not in OF_THE_SWEEP}
    keep = pieces[KEEP].written if KEEP in pieces else None
    if keep is not None:  # a missing value is reported with those of other keys
        values = settled(keep, {key: piece.written for key, piece in cell.items()})
        cell |= {key: Piece(value) for key, value in values.items()}
    return cell


def _piece(key: str, layers: Iterable[Layer], overrides: Iterable[Override]) -> Piece | None:
    """Return what files and overrides make of a key; None: they delete it."""
    config: dict[str, Any] = {}
    for package, file in layers:
        content = file.content if package else {key: file.content[key]}
        for name in reversed(package.split(".") if package else ()):
            content = {name: content}
        config = merged(config, content)
    for override in overrides:
        config = _changed(config, override)
    return Piece(config[key]) if key in config else None


def _changed(config: Mapping[str, Any], override: Override) -> dict[str, Any]:
    """Return a config in which an override sets, adds or deletes a value; unchanged tables are shared.

    Raises:
        UserError: the key does not exist, or exists where it is to be added.
    """
    key, value, line = override.key_or_group, override.value(), str(override.input_line)
    if override.package is not None:
        raise UserError(f"{line}: {key} is no group of names; valid: {key}=<value>")
    adds, prefix = override.is_add() or override.is_force_add(), ""
    changed = table = dict(config)
    *path, name = key.split(".")
    for part in path:
        if part not in table and not adds:
            raise unknown_key(key, (f"{prefix}{valid}" for valid in table))
        child = table.get(part)
        if (child is not None and not isinstance(child, dict)) or (child is None and not adds):
            place = f"{prefix}{part}"
            raise UserError(f"{key} is not a config key: {place} is a value; valid: {place}")
        table[part] = dict(child or {})
        table, prefix = table[part], f"{prefix}{part}."
    present = table.get(name)
    if name not in table and not adds:
        raise unknown_key(key, (f"{prefix}{valid}" for valid in table))
    if override.is_delete():
        if value not in (None, present):
            raise UserError(f"{line}: {key} is {present!r}; valid: ~{key}")
        del table[name]
    elif override.is_add() and present is not None and not isinstance(value, dict | list):
        raise UserError(f"{line}: {key} exists; valid: {line[1:]}")
    else:
        _check_names(key, present, value, adds)
        if isinstance(present, dict) and isinstance(value, dict):
            value = merged(present, value)
        table[name] = value
    return changed


def _check_names(key: str, present: Any, value: Any, adds: bool) -> None:
    """Raise UserError if a table sets names that the present one lacks."""
    if adds or not isinstance(present, dict) or not isinstance(value, dict):
        return
    for name in value:
        if name not in present:
            raise unknown_key(f"{key}.{name}", (f"{key}.{valid}" for valid in present))
        _check_names(f"{key}.{name}", present[name], value[name], adds)
