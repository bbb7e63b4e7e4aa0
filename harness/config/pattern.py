"""Cells that choose from the same groups: the first is composed in full, others by the sections that differ from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf

from espalier.harness.config.cell_config import Piece
from espalier.harness.config.grids import KEY as GRIDS

#: Keys of a composed config that say which cells there are, and nothing of one of them.
OF_THE_SWEEP = ("hydra", GRIDS)

#: Composes a command line in full.
Whole = Callable[[Sequence[str]], DictConfig]


@dataclass
class Pattern:
    """Cells that choose from the same groups; the first of them is composed in full.

    Args:
        loader: merges files as Hydra does.
        repository: the files, each read once.
        frame: overrides that are no choices of one section, such as `+experiment=<name>`.
        first: the first cell's choices by their keys.
        whole: composes in full.
    """

    loader: ConfigLoaderImpl
    repository: CachingConfigRepository
    frame: tuple[str, ...]
    first: Mapping[str, str]
    whole: Whole
    _sections: dict[tuple[str, str], Piece | None] = field(default_factory=dict)
    _changed: dict[tuple[Any, ...], Piece | None] = field(default_factory=dict)

    def pieces(
        self, choices: Mapping[str, str], values: Sequence[Override]
    ) -> dict[str, Piece] | None:
        """Return the pieces of a cell; None where one of its choices reaches beyond its section."""
        pieces = dict(self._firsts)
        for key, choice in choices.items():
            if choice != self.first[key]:
                section = self._section(key, choice)
                if section is None:
                    return None
                pieces[key] = section
        touching: dict[str, list[Override]] = {}
        for one in values:
            touching.setdefault(_top(one), []).append(one)
        if not all(_alone(pieces.get(key), given) for key, given in touching.items()):
            return with_values(pieces, values)
        for key, given in touching.items():
            asked = (key, choices.get(key), *(one.input_line for one in given))
            if asked not in self._changed:
                own = {key: pieces[key]} if key in pieces else {}
                self._changed[asked] = with_values(own, given).get(key)
            piece = self._changed[asked]
            if piece is None:
                del pieces[key]
            else:
                pieces[key] = piece
        return pieces

    @cached_property
    def _firsts(self) -> dict[str, Piece]:
        config = self.whole([*self.frame, *self.first.values()])
        return _pieces(config)

    @cached_property
    def _list(self) -> list[ResultDefault]:
        return self._defaults(self.first)

    def _defaults(self, choices: Mapping[str, str]) -> list[ResultDefault]:
        overrides = OverridesParser.create().parse_overrides([*self.frame, *choices.values()])
        return create_defaults_list(
            repo=self.repository,
            config_name="config",
            overrides_list=overrides,
            prepend_hydra=True,
            skip_missing=False,
        ).defaults

    def _section(self, key: str, choice: str) -> Piece | None:
        """Return what a key holds under another choice than the first cell's; None where that changes more."""
        if (key, choice) not in self._sections:
            self._sections[key, choice] = self._composed(key, choice)
        return self._sections[key, choice]

    def _composed(self, key: str, choice: str) -> Piece | None:
        found = self._defaults({**self.first, key: choice})
        if _others(found, key) != _others(self._list, key) or any(map(self._wavers, found)):
            return None
        files = [one for one in found if one.package == "" or _below(one, key)]
        config = self.loader._compose_config_from_defaults_list(files, _Copies(self.repository))
        return _pieces(config).get(key)

    def _wavers(self, file: ResultDefault) -> bool:
        """Say whether a file names another one by a choice of the cell: `- ${model}_words` among its defaults."""
        assert file.config_path is not None
        loaded = self.repository.load_config(file.config_path)
        if loaded is None or file.config_path.startswith("hydra/"):
            return False
        return any("${" in repr(one) for one in loaded.defaults_list or [])


class _Copies(CachingConfigRepository):
    """Files for somebody who merges other files into them."""

    def __init__(self, files: CachingConfigRepository) -> None:
        self.files = files

    def get_schema_source(self) -> ConfigSource:
        return self.files.get_schema_source()

    def load_config(self, config_path: str) -> ConfigResult | None:
        found = self.files.load_config(config_path)
        return copy.deepcopy(found)


def _others(files: Iterable[ResultDefault], key: str) -> list[ResultDefault]:
    return [one for one in files if not _below(one, key)]


def _below(file: ResultDefault, key: str) -> bool:
    return f"{file.package}.".startswith(f"{key}.")


def _pieces(config: DictConfig) -> dict[str, Piece]:
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): Piece(value) for key, value in plain.items() if key not in OF_THE_SWEEP}


def with_values(pieces: Mapping[str, Piece], values: Sequence[Override]) -> dict[str, Piece]:
    """Return the pieces of a config in which a command line sets values, adds and deletes them.

    Raises:
        HydraException: it cannot.
    """
    config = OmegaConf.create({key: piece.written for key, piece in pieces.items()})
    # As Hydra has it: what is not there is set with `+` alone.
    OmegaConf.set_struct(config, True)
    ConfigLoaderImpl._apply_overrides_to_config(list(values), config)
    return _pieces(config)


def _alone(piece: Piece | None, given: Sequence[Override]) -> bool:
    """Say whether nothing but the key's own piece decides what comes of it where these values are set in it."""
    refer = any("${" in str(one.input_line) for one in given)
    if not refer and not (piece is not None and piece.refers):
        return True
    return len(given) == 1 and (piece is None or _replaces(given[0], piece.written))


def _replaces(override: Override, written: Any) -> bool:
    """Say whether an override puts a value in the place of another one in tables that are really there."""
    adds = override.is_add() or override.is_force_add() or override.is_delete()
    for name in override.key_or_group.split(".")[1:-1]:
        if not isinstance(written, dict) or name not in written:
            return False
        written = written[name]
    plain = "[" not in override.key_or_group and not isinstance(override.value(), dict | list)
    return plain and not adds


def _top(override: Override) -> str:
    return override.key_or_group.partition(".")[0].partition("[")[0]
