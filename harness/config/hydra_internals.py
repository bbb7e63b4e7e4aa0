"""Everything that the harness uses of Hydra's private modules, for Hydra 1.3 (requirements.txt: `hydra-core<1.4`).

Hydra has no public way to merge one section, to apply overrides to a config, to read a command line without running it,
or to list the cells of a sweep. `hydra.compose` takes 0.1 s for each cell: a sweep of 1,000 cells would start after two
minutes in place of three seconds.
"""

from __future__ import annotations

import copy
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathElement
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig

#: Reads the files of a search path and merges them.
Loader: TypeAlias = ConfigLoaderImpl

#: Reads the files of one folder.
FolderSource: TypeAlias = FileConfigSource

#: The files of a search path, each read once.
Repository: TypeAlias = CachingConfigRepository


def loader_of(folder: Path) -> Loader:
    """Return a loader of a folder that is independent of Hydra's global state."""
    return ConfigLoaderImpl(config_search_path=create_config_search_path(str(folder)))


def search_also(loader: Loader, provider: str, places: Iterable[str]) -> None:
    """Add places to the end of a loader's search path."""
    path = loader.config_search_path
    elements = [SearchPathElement(provider, place) for place in places]
    if elements:
        # Hydra's schemas have to be last.
        path.get_path()[-1:-1] = elements
        loader.repository = ConfigRepository(path)


def global_loader() -> Loader:
    """Return the loader of the Hydra that is initialized now."""
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    return loader


def repository_of(loader: Loader) -> Repository:
    """Return the loader's files."""
    repository = loader._parse_overrides_and_create_caching_repo("config", [])[1]
    assert isinstance(repository, CachingConfigRepository)
    return repository


def defaults_list(repository: Repository, overrides: list[Override]) -> list[ResultDefault]:
    """Return the files that a command line merges, in their order."""
    return create_defaults_list(
        repo=repository,
        config_name="config",
        overrides_list=overrides,
        prepend_hydra=True,
        skip_missing=False,
    ).defaults


def merge_files(loader: Loader, files: list[ResultDefault], repository: Repository) -> DictConfig:
    """Return the config that files make; those of the repository stay as they are."""
    return loader._compose_config_from_defaults_list(files, _CopiedFiles(repository))


def apply_overrides(overrides: Iterable[Override], config: DictConfig) -> None:
    """Set, add and delete values of a config as a command line does."""
    ConfigLoaderImpl._apply_overrides_to_config(list(overrides), config)


def argument_parser() -> ArgumentParser:
    """Return the parser of Hydra's own flags."""
    return get_args_parser()


def split_sweep(overrides: list[Override]) -> list[list[str]]:
    """Return the overrides of each cell of a sweep; the last override with several values varies fastest."""
    cells: Sequence[list[list[str]]] = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    return cells[0]


class _CopiedFiles(CachingConfigRepository):
    """Copies of a repository's files: merging changes the config of a file."""

    def __init__(self, files: Repository) -> None:
        self.files = files

    def get_schema_source(self) -> ConfigSource:
        return self.files.get_schema_source()

    def load_config(self, config_path: str) -> ConfigResult | None:
        return copy.deepcopy(self.files.load_config(config_path))
