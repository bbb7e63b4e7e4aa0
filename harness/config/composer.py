"""Cells out of sections: a sweep composes each choice of a config group once, not once for every cell.

Hydra takes a tenth of a second for a cell, and a sweep has hundreds that differ in a few choices and values. Hydra's
defaults list shows what a choice contributes: if another choice of a group changes that list below its own key alone,
its section can replace the other one. Cells for which this does not hold, or that Hydra refuses, are composed by Hydra
in full: the result and every error line are always Hydra's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import yaml
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from espalier.harness.config.cell_config import Cell, Piece, resolved, resolved_pieces
from espalier.harness.config.grids import KEY as GRIDS
from espalier.harness.config.hydra_internals import (
    Loader,
    Repository,
    apply_overrides,
    defaults_list,
    merge_files,
    repository_of,
)
from espalier.harness.config.kept_tokens import KEEP, settled
from espalier.harness.errors import UserError

#: Keys of a composed config that describe the sweep and not a cell.
OF_THE_SWEEP = ("hydra", GRIDS)

#: Composes a command line in full.
FullComposition = Callable[[Sequence[str]], DictConfig]


class _ParsedOverride(NamedTuple):
    """An override of a command line.

    Attributes:
        override: as Hydra parses it.
        section: the key of the section that it chooses, if that is all it does.
        chooses: whether it chooses from a config group.
    """

    override: Override
    section: str | None
    chooses: bool


@dataclass
class Composer:
    """Composes the cells of one command.

    Args:
        loader: reads the files of conf/.
        in_full: composes a cell in full, or raises what is wrong with it; without Hydra's own section.
    """

    loader: Loader
    in_full: FullComposition
    _parsed: dict[str, _ParsedOverride] = field(default_factory=dict)
    _patterns: dict[tuple[Any, ...], _CellPattern] = field(default_factory=dict)

    def cell(self, overrides: Sequence[str]) -> Cell:
        """Return the resolved config of a cell. Cost: 1 ms, and 20 ms for each choice that no cell had before.

        Raises:
            UserError: what is wrong with the overrides.
        """
        try:
            pieces = self.pieces(overrides)
            if pieces is not None:
                return resolved_pieces(pieces)
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, UserError):
            # Composing the cell in full raises the error with its reason.
            pass
        return resolved(self.in_full(overrides))

    def pieces(self, overrides: Sequence[str]) -> dict[str, Piece] | None:
        """Return the unresolved piece of each key of a cell; None where the cell is not made of single sections."""
        frame: list[str] = []
        choices: dict[str, str] = {}
        values: list[Override] = []
        for text in overrides:
            override, section, chooses = self._parse(text)
            if override.is_sweep_override() or override.key_or_group.startswith(
                ("[", "hydra.searchpath")
            ):
                return None
            if section is not None:
                choices[section] = text
            elif chooses or override.is_hydra_override():
                frame.append(text)
            else:
                values.append(override)
        pieces = self._pattern(tuple(frame), choices).pieces(choices, values)
        return None if pieces is None else pieces | _budget(pieces)

    def _parse(self, text: str) -> _ParsedOverride:
        if text not in self._parsed:
            override = OverridesParser.create().parse_overrides([text])[0]
            group = self._repository.group_exists(override.key_or_group)
            value = None if override.is_sweep_override() else override.value()
            chooses = group and not override.is_sweep_override() and not isinstance(value, dict)
            replaces = not (override.is_add() or override.is_force_add() or override.is_delete())
            key = override.package or override.key_or_group
            single = chooses and replaces and isinstance(value, str) and key.isidentifier()
            self._parsed[text] = _ParsedOverride(override, key if single else None, chooses)
        return self._parsed[text]

    def _pattern(self, frame: tuple[str, ...], choices: Mapping[str, str]) -> _CellPattern:
        groups = (frame, *choices)
        if groups not in self._patterns:
            self._patterns[groups] = _CellPattern(
                self.loader, self._repository, frame, dict(choices), self.in_full
            )
        return self._patterns[groups]

    @cached_property
    def _repository(self) -> Repository:
        return repository_of(self.loader)


@dataclass
class _CellPattern:
    """Cells that choose from the same groups: the first is composed in full, others differ in sections.

    Args:
        loader: merges files as Hydra does.
        repository: the files, each read once.
        frame: overrides that do not choose one section, such as `+experiment=<name>`.
        first_choices: the first cell's choices by their keys.
        in_full: composes in full.
    """

    loader: Loader
    repository: Repository
    frame: tuple[str, ...]
    first_choices: Mapping[str, str]
    in_full: FullComposition
    _sections: dict[tuple[str, str], Piece | None] = field(default_factory=dict)
    _changed_pieces: dict[tuple[Any, ...], Piece | None] = field(default_factory=dict)

    def pieces(
        self, choices: Mapping[str, str], values: Sequence[Override]
    ) -> dict[str, Piece] | None:
        """Return the pieces of a cell; None where one of its choices changes more than its section."""
        pieces = dict(self._first_pieces)
        for key, choice in choices.items():
            if choice != self.first_choices[key]:
                section = self._section(key, choice)
                if section is None:
                    return None
                pieces[key] = section
        by_key: dict[str, list[Override]] = {}
        for override in values:
            by_key.setdefault(_top_key(override), []).append(override)
        if not all(_independent(pieces.get(key), changes) for key, changes in by_key.items()):
            return _with_values(pieces, values)
        for key, changes in by_key.items():
            change = (key, choices.get(key), *(override.input_line for override in changes))
            if change not in self._changed_pieces:
                section_alone = {key: pieces[key]} if key in pieces else {}
                self._changed_pieces[change] = _with_values(section_alone, changes).get(key)
            piece = self._changed_pieces[change]
            if piece is None:
                del pieces[key]
            else:
                pieces[key] = piece
        return pieces

    @cached_property
    def _first_pieces(self) -> dict[str, Piece]:
        return _pieces(self.in_full([*self.frame, *self.first_choices.values()]))

    @cached_property
    def _first_files(self) -> list[ResultDefault]:
        return self._files(self.first_choices)

    def _files(self, choices: Mapping[str, str]) -> list[ResultDefault]:
        overrides = OverridesParser.create().parse_overrides([*self.frame, *choices.values()])
        return defaults_list(self.repository, overrides)

    def _section(self, key: str, choice: str) -> Piece | None:
        """Return the piece of a key under another choice than the first cell's; None where that changes more."""
        if (key, choice) not in self._sections:
            self._sections[key, choice] = self._compose_section(key, choice)
        return self._sections[key, choice]

    def _compose_section(self, key: str, choice: str) -> Piece | None:
        files = self._files({**self.first_choices, key: choice})
        unchanged = _files_outside(files, key) == _files_outside(self._first_files, key)
        if not unchanged or any(map(self._depends_on_choices, files)):
            return None
        section_files = [file for file in files if file.package == "" or _is_below(file, key)]
        return _pieces(merge_files(self.loader, section_files, self.repository)).get(key)

    def _depends_on_choices(self, file: ResultDefault) -> bool:
        """Return whether a file names another one by a choice of the cell: `- ${model}_words` among its defaults."""
        assert file.config_path is not None
        loaded = self.repository.load_config(file.config_path)
        if loaded is None or file.config_path.startswith("hydra/"):
            return False
        return any("${" in repr(default) for default in loaded.defaults_list or [])


def _budget(pieces: Mapping[str, Piece]) -> dict[str, Piece]:
    """Return the ratio and the number of tokens of a cell as one of them replaces the other."""
    keep = pieces[KEEP].written if KEEP in pieces else None
    if keep is None:
        return {}
    values = settled(keep, {key: piece.written for key, piece in pieces.items()})
    return {key: Piece(value) for key, value in values.items()}


def _files_outside(files: Iterable[ResultDefault], key: str) -> list[ResultDefault]:
    return [file for file in files if not _is_below(file, key)]


def _is_below(file: ResultDefault, key: str) -> bool:
    return f"{file.package}.".startswith(f"{key}.")


def _pieces(config: DictConfig) -> dict[str, Piece]:
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): Piece(value) for key, value in plain.items() if key not in OF_THE_SWEEP}


def _with_values(pieces: Mapping[str, Piece], values: Sequence[Override]) -> dict[str, Piece]:
    """Return the pieces of a config after a command line sets, adds and deletes values.

    Raises:
        HydraException: it cannot.
    """
    config = OmegaConf.create({key: piece.written for key, piece in pieces.items()})
    # As in Hydra: a key that does not exist is set with `+` alone.
    OmegaConf.set_struct(config, True)
    apply_overrides(values, config)
    return _pieces(config)


def _independent(piece: Piece | None, changes: Sequence[Override]) -> bool:
    """Return whether the result of these changes in a key's piece depends on no other key."""
    refers = any("${" in str(override.input_line) for override in changes)
    if not refers and not (piece is not None and piece.refers):
        return True
    return len(changes) == 1 and (piece is None or _replaces_value(changes[0], piece.written))


def _replaces_value(override: Override, written: Any) -> bool:
    """Return whether an override replaces one value by another one, in tables that exist."""
    adds = override.is_add() or override.is_force_add() or override.is_delete()
    for name in override.key_or_group.split(".")[1:-1]:
        if not isinstance(written, dict) or name not in written:
            return False
        written = written[name]
    simple = "[" not in override.key_or_group and not isinstance(override.value(), dict | list)
    return simple and not adds


def _top_key(override: Override) -> str:
    return override.key_or_group.partition(".")[0].partition("[")[0]
