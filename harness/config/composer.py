"""Cells out of sections: each choice of a config group is composed once, not once for every cell that makes it.

Hydra composes a cell in a tenth of a second and more, and a sweep has hundreds that differ in a few choices and values.
What a choice contributes is known from Hydra's own defaults list: where another choice of a group changes that list
below its own key alone, its section can be put in the place of the other's. Cells for which this does not hold, or that
Hydra refuses, are left to Hydra: nothing is told or composed here that it would tell or compose otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from espalier.harness.config.cell_config import Cell, Piece, resolved, resolved_pieces
from espalier.harness.config.pattern import Pattern, Whole
from espalier.harness.errors import UserError


@dataclass
class Composer:
    """Composes the cells of one command.

    Args:
        loader: reads the files of conf/.
        whole: composes a cell in full, or says what is wrong with it; without Hydra's own section.
    """

    loader: ConfigLoaderImpl
    whole: Whole
    _seen: dict[str, tuple[Override, str | None, bool]] = field(default_factory=dict)
    _patterns: dict[tuple[Any, ...], Pattern] = field(default_factory=dict)

    def cell(self, overrides: Sequence[str]) -> Cell:
        """Return the resolved config of a cell. Cost: 1 ms, and 20 ms for each choice that no cell had before.

        Raises:
            UserError: what is wrong with the overrides.
        """
        try:
            pieces = self.pieces(overrides)
            if pieces is not None:
                return resolved_pieces(pieces)
        except (HydraException, OmegaConfBaseException, yaml.MarkedYAMLError, UserError):
            # Composing all of it tells what is wrong.
            pass
        return resolved(self.whole(overrides))

    def pieces(self, overrides: Sequence[str]) -> dict[str, Piece] | None:
        """Return what each key of a cell holds as it is written; None where it is no matter of single sections."""
        frame: list[str] = []
        choices: dict[str, str] = {}
        values: list[Override] = []
        for text in overrides:
            one, key, chooses = self._read(text)
            if one.is_sweep_override() or one.key_or_group.startswith(("[", "hydra.searchpath")):
                return None
            if key is not None:
                choices[key] = text
            elif chooses or one.is_hydra_override():
                frame.append(text)
            else:
                values.append(one)
        pattern = self._pattern(tuple(frame), choices)
        return pattern.pieces(choices, values)

    def _read(self, text: str) -> tuple[Override, str | None, bool]:
        """Return an override, the key of the section that it chooses if that is all it does, and whether it chooses."""
        if text not in self._seen:
            one = OverridesParser.create().parse_overrides([text])[0]
            group = self._repository.group_exists(one.key_or_group)
            chooses = group and not one.is_sweep_override() and not isinstance(one.value(), dict)
            plain = not (one.is_add() or one.is_force_add() or one.is_delete())
            key = one.package or one.key_or_group
            alone = chooses and plain and isinstance(one.value(), str) and key.isidentifier()
            self._seen[text] = (one, key if alone else None, chooses)
        return self._seen[text]

    def _pattern(self, frame: tuple[str, ...], choices: Mapping[str, str]) -> Pattern:
        asked = (frame, *choices)
        if asked not in self._patterns:
            self._patterns[asked] = Pattern(
                self.loader, self._repository, frame, dict(choices), self.whole
            )
        return self._patterns[asked]

    @cached_property
    def _repository(self) -> CachingConfigRepository:
        # With the sources that `hydra.searchpath` of conf/config.yaml adds.
        return self.loader._parse_overrides_and_create_caching_repo("config", [])[1]
